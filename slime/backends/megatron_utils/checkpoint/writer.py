"""Writes checkpoints, one at a time, while training waits or in the background.

    save     collect the state -> shards to a hidden directory (here, or in a thread)
             and the checksums of this rank's shards, from the page cache
    finish   when every rank has written: metadata -> manifest -> rename -> tracker -> delete old checkpoints

With ``--async-save`` training continues after the copy to host memory. :meth:`poll`, called on all ranks between steps,
finishes the save once all threads are done. The next save and the end of the run wait for it. If a process dies in
between, the previous checkpoint stays the latest one.
"""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from torch.distributed.checkpoint.api import CheckpointException

from slime.backends.megatron_utils.checkpoint.state import SHARDING, CheckpointContent, describe_shape, sharded_state
from slime.backends.megatron_utils.step import TrainState
from slime.backends.training import checkpoint_files as files
from slime.backends.training.checksums import checksums_of, written_by
from slime.models.shape import ModelShape
from slime.utils import accelerator
from slime.utils.distributed_utils import do_on_first_rank
from slime.utils.errors import SlimeError

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_PLAIN = (bool, int, float, str, type(None))  # pickles of other types could not be loaded without slime


@dataclass
class _Pending:
    iteration: int
    request: Any
    thread: threading.Thread
    error: list[BaseException]
    content: CheckpointContent
    name: str
    checksums: dict[str, str]
    started: float = field(default_factory=time.monotonic)


class CheckpointWriter:
    """The checkpoints of one model under ``root``. Every method is called on all ranks at the same time.

    Args:
        keep: number of newest checkpoints to keep. None keeps all.
        timeout_s: longest wait for a background save.
    """

    def __init__(self, root: str, *, keep: int | None = None, timeout_s: float = 3600.0) -> None:
        self._root = Path(root)
        self._keep = keep
        self._timeout_s = timeout_s
        self._pending: _Pending | None = None

    def save(
        self,
        state: TrainState,
        shape: ModelShape,
        args: Namespace,
        iteration: int,
        content: CheckpointContent,
        *,
        in_background: bool = False,
        name: str | None = None,
    ) -> None:
        """Write ``iteration``. Without ``in_background`` it is complete, and named by the tracker, on return.

        Args:
            name: directory and text of the tracker instead of the iteration's: "release".
        """
        self.finish()
        name = name or files.iteration_directory(self._root, iteration).name
        partial = files.partial_directory(self._root, name)
        if failure := do_on_first_rank(lambda: files.make_empty(partial)):
            raise self._not_written(name, {0: failure})
        state_dict = sharded_state(state, content, is_loading=False)
        state_dict |= {
            "args": Namespace(**{name: value for name, value in vars(args).items() if isinstance(value, _PLAIN)}),
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "model_shape": describe_shape(shape),
        }
        if content.has_optimizer:
            state_dict["opt_param_scheduler"] = state.scheduler.state_dict()
        request = dist_checkpointing.save(
            state_dict,
            str(partial),
            get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1),
            content_metadata=SHARDING,
            async_sharded_save=True,  # in any case: the thread of ``_start`` writes the shards
        )
        self._pending = self._start(request, iteration, content, name, in_background)
        if not in_background:
            self.finish()

    def poll(self) -> bool:
        """Finish the save in the background if every rank has written its part. True when none is left."""
        if self._pending is None:
            return True
        is_written, _ = self._progress(self._pending)
        if is_written:
            self._commit(self._pending)
        return is_written

    def finish(self) -> None:
        """Wait for the save in the background, if any, and complete it.

        Raises:
            SlimeError: a rank could not write its part, or did not within the time limit.
        """
        if self._pending is None:
            return
        pending = self._pending
        is_written, is_over = self._progress(pending)
        # The ranks compare their progress in short steps. In one long collective, ranks that have written everything
        # would run into --distributed-timeout-minutes, which ends the process.
        while not is_written and not is_over:
            pending.thread.join(_POLL_S)
            is_written, is_over = self._progress(pending)
        if pending.thread.is_alive():
            # Only on the late rank; ``_complete`` raises on all.
            pending.error.append(TimeoutError(f"still writing after {self._timeout_s:.0f} s"))
        self._commit(pending)

    def _progress(self, pending: _Pending) -> tuple[bool, bool]:
        """Whether every rank has written its part, and whether the time of any rank is over. A collective."""
        is_written = not pending.thread.is_alive()
        has_time = time.monotonic() < pending.started + self._timeout_s
        # MIN: 1 if true on all ranks.
        all_of = torch.tensor([int(is_written), int(has_time)], device=accelerator.current().device())
        dist.all_reduce(all_of, op=dist.ReduceOp.MIN)
        all_written, all_have_time = all_of.tolist()
        return bool(all_written), not all_have_time

    def _start(
        self, request: Any, iteration: int, content: CheckpointContent, name: str, in_background: bool
    ) -> _Pending:
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            # Device to host. Training may change the device tensors from here on: the thread reads only host copies.
            arguments[1] = request.preload_fn()
            if in_background and accelerator.current().is_cpu:  # the host tensors are the live ones
                arguments[1] = _copied(arguments[1])
        error: list[BaseException] = []
        checksums: dict[str, str] = {}
        partial = files.partial_directory(self._root, name)

        def write() -> None:
            try:
                if request.async_fn is not None:
                    request.async_fn(*arguments, **request.async_fn_kwargs)
                    checksums.update(checksums_of(written_by(partial, dist.get_rank())))
            except BaseException as caught:  # CheckpointException is one; ``_complete`` raises it on all ranks
                error.append(caught)

        thread = threading.Thread(target=write, name=f"save-{name}", daemon=True)
        thread.start()
        return _Pending(iteration, request, thread, error, content, name, checksums)

    def _commit(self, pending: _Pending) -> None:
        self._pending = None
        try:
            self._complete(pending)
        except SlimeError:
            # Megatron's queue may still hold what this save wrote, or will get it from a writer that is late. The next
            # save would record it in its metadata, and the checkpoint could not be loaded.
            filesystem_async._results_queue = None
            raise

    def _complete(self, pending: _Pending) -> None:
        """The steps after the shards. All ranks call it, after their threads have ended."""
        reports: list[tuple[str | None, dict[str, str]]] = [(None, {})] * dist.get_world_size()
        mine = f"{type(pending.error[0]).__name__}: {pending.error[0]}" if pending.error else None
        dist.all_gather_object(reports, (mine, pending.checksums))
        if any(error for error, _ in reports):
            raise self._not_written(pending.name, {rank: error for rank, (error, _) in enumerate(reports)})
        try:
            for function in pending.request.finalize_fns:
                function()
        except CheckpointException as error:  # a BaseException: callers catch only Exception
            causes = {rank: " ".join(str(cause).split()) for rank, (cause, _) in error.failures.items()}
            raise self._not_written(pending.name, causes) from None
        dist.barrier()  # no rank writes into the directory after its renaming
        checksums = {name: value for _, one in reports for name, value in one.items()}
        if failure := do_on_first_rank(lambda: self._publish(pending, checksums)):
            raise self._not_written(pending.name, {0: failure})

    def _not_written(self, name: str, causes: Mapping[int, str | None]) -> SlimeError:
        named = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items() if cause) or "another rank failed"
        return SlimeError(
            f"checkpoint {self._root}/{name} could not be written: {named}. Is the disk full? The checkpoint "
            "before it is still complete."
        )

    def _publish(self, pending: _Pending, checksums: Mapping[str, str]) -> None:
        removed = files.publish(
            self._root,
            pending.name,
            pending.iteration,
            layout=_layout(),
            content={"optimizer": pending.content.has_optimizer, "rng": pending.content.has_rng},
            checksums=checksums,
            keep=self._keep,
        )
        seconds = time.monotonic() - pending.started
        final = self._root / pending.name
        logger.info("saved %s in %.1f s%s", final, seconds, f", removed {removed}" if removed else "")


def _copied(buckets: list[Any]) -> list[Any]:
    """Copies of the host tensors in Megatron's write buckets."""
    return [
        (file, key, (raw, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (raw, tensors) in buckets
    ]


def _layout() -> Mapping[str, int]:
    return {
        "world_size": dist.get_world_size(),
        "tensor": mpu.get_tensor_model_parallel_world_size(),
        "pipeline": mpu.get_pipeline_model_parallel_world_size(),
        "context": mpu.get_context_parallel_world_size(),
        "expert": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor": mpu.get_expert_tensor_parallel_world_size(),
    }
