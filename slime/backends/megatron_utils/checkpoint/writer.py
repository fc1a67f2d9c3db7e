"""Writes checkpoints, one at a time, while training waits or in the background.

    save     collect the state -> ``shard_files`` to a hidden directory, in a thread
             and the checksums of this rank's shards, from the page cache
    finish   when every rank has written: metadata -> manifest -> rename -> tracker -> delete old checkpoints

A save reads the live tensors and gathers nothing. It holds a few pieces of 128 MiB in host memory at a time. With
``--async-save`` it copies up to 4 bytes per parameter of the rank to host memory, and training continues when the rest
is written. :meth:`poll`, called on all ranks between steps, finishes the save once all threads are done. The next save
and the end of the run wait for it. If a process dies in between, the previous checkpoint stays the latest one.
"""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from slime.backends.megatron_utils.checkpoint import shard_files
from slime.backends.megatron_utils.checkpoint.state import (
    SHARDING,
    CheckpointContent,
    TrainState,
    describe_shape,
    sharded_state,
)
from slime.backends.training import checkpoint_files as files
from slime.backends.training import pieces
from slime.backends.training.adapter_files import ADAPTER
from slime.backends.training.checkpoint_files import checksums_of, written_by
from slime.backends.training.pieces import Piece
from slime.models.shape import ModelShape
from slime.utils.distributed_utils import do_on_first_rank, files_group
from slime.utils.errors import SlimeError, kept

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_COPIED_BYTES = 4  # per parameter of the rank, of a save in the background
_PLAIN = (bool, int, float, str, type(None))  # pickles of other types could not be loaded without slime


class _Pending:
    """A save under way. ``thread`` writes this rank's part.

    Attributes:
        content: for the manifest.
        metadata: of the shards of all ranks. Only on rank 0.
        is_free: the live tensors are written or copied: training may change them.
        num_bytes: written so far.
        seen: bytes that all ranks had written at the last comparison, and when that number last grew.
    """

    def __init__(self, iteration: int, content: dict[str, Any], name: str, metadata: Metadata | None) -> None:
        self.iteration = iteration
        self.content = content
        self.name = name
        self.metadata = metadata
        self.results: list[WriteResult] = []
        self.checksums: dict[str, str] = {}
        self.error: list[BaseException] = []
        self.is_free = threading.Event()
        self.num_bytes = 0
        self.started = time.monotonic()
        self.seen = (0, self.started)
        self.thread = threading.Thread()

    def start(self, parts: Sequence[Piece], partial: Path, max_copied: int) -> None:
        """Write ``parts`` in a thread. Those of up to ``max_copied`` bytes are copied now and written last."""
        rest, copies = pieces.keep_copies(parts, max_copied) if max_copied else (parts, [])

        def count(num_bytes: int) -> None:
            self.num_bytes += num_bytes

        def write() -> None:
            with kept(self.error, BaseException):  # ``_complete`` raises it on all ranks
                self.results += pieces.write(rest, partial, "live", count)
                self.is_free.set()
                self.results += pieces.write(copies, partial, "copied", count)
                self.checksums |= checksums_of(written_by(partial, dist.get_rank()))
            self.is_free.set()

        self.thread = threading.Thread(target=write, name=f"save-{self.name}", daemon=True)
        self.thread.start()

    def compare(self, timeout_s: float) -> tuple[bool, bool, bool]:
        """Whether all ranks' tensors are free, all have written, and none has for ``timeout_s``. A collective."""
        is_late = time.monotonic() > self.seen[1] + timeout_s
        mine = [int(self.is_free.is_set()), int(not self.thread.is_alive()), int(is_late), self.num_bytes]
        sums = torch.tensor(mine, dtype=torch.int64)
        dist.all_reduce(sums, group=files_group())
        num_free, num_written, num_late, num_bytes = sums.tolist()
        is_over = num_late > 0 and num_bytes == self.seen[0]
        if num_bytes != self.seen[0]:
            self.seen = (num_bytes, time.monotonic())
        return num_free == dist.get_world_size(), num_written == dist.get_world_size(), is_over


class CheckpointWriter:
    """The checkpoints of one model under ``root``. Every method is called on all ranks at the same time.

    Args:
        keep: number of newest checkpoints to keep. None keeps all.
        timeout_s: a save ends with an error if no rank writes anything for this long.
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
        arguments: Mapping[str, Any],
        iteration: int,
        content: CheckpointContent,
        *,
        in_background: bool = False,
        name: str | None = None,
    ) -> None:
        """Write ``iteration``. Without ``in_background`` it is complete, and named by the tracker, on return.

        Args:
            arguments: of the run. Plain values become the checkpoint's ``args``.
            name: directory and text of the tracker instead of the iteration's: "release".
        """
        self.finish()
        name = name or files.iteration_directory(self._root, iteration).name
        partial = files.partial_directory(self._root, name)
        if failure := do_on_first_rank(lambda: files.make_empty(partial)):
            raise self._not_written(name, {0: failure})
        state_dict = sharded_state(state, content, is_loading=False)
        state_dict |= {
            "args": Namespace(**{name: value for name, value in arguments.items() if isinstance(value, _PLAIN)}),
            "checkpoint_version": 3.0,
            "content_metadata": SHARDING,
            "iteration": iteration,
            "model_shape": describe_shape(shape),
        }
        if content.has_optimizer:
            state_dict["opt_param_scheduler"] = state.scheduler.state_dict()
        parts, metadata, failure = shard_files.plan(state_dict, partial)
        if failure:
            raise self._not_written(name, {0: failure})
        max_copied = 0
        if in_background:
            parameters = [parameter for chunk in state.chunks for parameter in chunk.parameters()]
            is_saved = [state.adapter is None or parameter.requires_grad for parameter in parameters]
            max_copied = _COPIED_BYTES * sum(p.numel() for p, saved in zip(parameters, is_saved, strict=True) if saved)
        described: dict[str, Any] = {"optimizer": content.has_optimizer, "rng": content.has_rng}
        if state.adapter is not None:
            described |= {ADAPTER: state.adapter}
        self._pending = _Pending(iteration, described, name, metadata)
        self._pending.start(parts, partial, max_copied)
        if in_background:
            self._wait(self._pending, is_end=False)
        else:
            self.finish()

    def poll(self) -> bool:
        """Finish the save in the background if every rank has written its part. True when none is left."""
        if self._pending is None:
            return True
        _, is_written, _ = self._pending.compare(self._timeout_s)
        if is_written:
            self._commit(self._pending)
        return is_written

    def finish(self) -> None:
        """Wait for the save in the background, if any, and complete it.

        Raises:
            SlimeError: a rank could not write its part, or no rank made progress within the time limit.
        """
        if self._pending is not None:
            self._wait(self._pending, is_end=True)
            self._commit(self._pending)

    def _wait(self, pending: _Pending, *, is_end: bool) -> None:
        """Wait until all ranks have written, or with ``is_end=False`` until training may go on."""
        # The ranks compare their progress in short steps: one long collective could not tell a slow disk from one
        # that hangs.
        while True:
            is_free, is_written, is_over = pending.compare(self._timeout_s)
            if is_over and pending.thread.is_alive():
                # Only on the late ranks; ``_complete`` raises on all.
                text = f"still writing, after {self._timeout_s:.0f} s in which no rank has written anything"
                pending.error.append(TimeoutError(text))
            if is_over or is_written or (is_free and not is_end):
                return
            if is_end:
                pending.thread.join(_POLL_S)
            else:
                pending.is_free.wait(_POLL_S)

    def _commit(self, pending: _Pending) -> None:
        """The steps after the shards. All ranks call it, after their threads have ended."""
        self._pending = None
        errors: list[str | None] = [None] * dist.get_world_size()
        mine = f"{type(pending.error[0]).__name__}: {pending.error[0]}" if pending.error else None
        dist.all_gather_object(errors, mine, group=files_group())
        if any(errors):
            raise self._not_written(pending.name, dict(enumerate(errors)))
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((pending.results, pending.checksums), parts, dst=0, group=files_group())
        if failure := do_on_first_rank(lambda: self._publish(pending, parts or [])):
            raise self._not_written(pending.name, {0: failure})

    def _not_written(self, name: str, causes: Mapping[int, str | None]) -> SlimeError:
        named = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items() if cause)
        return SlimeError(
            f"checkpoint {self._root}/{name} could not be written: {named}. Is the disk full? The checkpoint "
            "before it is still complete."
        )

    def _publish(self, pending: _Pending, parts: Sequence[tuple[list[WriteResult], dict[str, str]]]) -> None:
        assert pending.metadata is not None, "rank 0 has it"
        partial = files.partial_directory(self._root, pending.name)
        shard_files.finish(partial, pending.metadata, [results for results, _ in parts])
        checksums = {name: value for _, one in parts for name, value in one.items()}
        removed = files.publish(
            self._root,
            pending.name,
            pending.iteration,
            layout=_layout(),
            content=pending.content,
            checksums=checksums,
            keep=self._keep,
        )
        seconds = time.monotonic() - pending.started
        final = self._root / pending.name
        logger.info("saved %s in %.1f s%s", final, seconds, f", removed {removed}" if removed else "")


def _layout() -> Mapping[str, int]:
    return {
        "world_size": dist.get_world_size(),
        "tensor": mpu.get_tensor_model_parallel_world_size(),
        "pipeline": mpu.get_pipeline_model_parallel_world_size(),
        "context": mpu.get_context_parallel_world_size(),
        "expert": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor": mpu.get_expert_tensor_parallel_world_size(),
    }
