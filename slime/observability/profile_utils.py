"""Profiles of the trainer: time (torch profiler) and memory (allocator history, memray).

    begin()             after the process groups exist
    section(name)       around a pass that --profile-target may name
    end_rollout(id)     once per rollout

Owned by one rank of the trainer. Without its flags every method does nothing. Knows no model and no batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from slime.config.groups import RunConfig
from slime.observability.arguments import ProfileArgs
from slime.observability.tracking import run_directory
from slime.utils import accelerator
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

Section = Literal["train_actor", "train_log_probs"]

_HISTORY_ENTRIES = 1_000_000


class TrainProfiler:
    """The profiles that the flags request, on one rank.

    ``--profile-step-start`` and ``--profile-step-end`` count rollouts since the start of this process.
    """

    def __init__(self, run: RunConfig, rank: int) -> None:
        self._settings = run[ProfileArgs]
        self._rank = rank
        named = self._settings.tensorboard_dir
        if named is None and self._settings.use_pytorch_profiler:
            named = str(run_directory(run.args) / "profile")
        self._directory = Path(named or ".")
        self._num_rollouts = 0
        self._overall: Any = None
        self._memory: _AllocatorHistory | _Memray | None = None

    def begin(self) -> None:
        """Start the profiles of whole rollouts."""
        settings = self._settings
        if settings.use_pytorch_profiler and "train_overall" in settings.profile_target:
            self._overall = _torch_profiler(settings, self._directory, f"train_overall_rank_{self._rank}")
            self._overall.start()
        if settings.record_memory_history:
            self._memory = _memory_recorder(settings, self._rank)
            self._memory.start()

    @contextmanager
    def section(self, name: Section) -> Iterator[None]:
        """Profile the block by itself, in the rollouts between start and end: one trace for each of them."""
        settings = self._settings
        is_wanted = settings.use_pytorch_profiler and name in settings.profile_target
        if not is_wanted or not settings.profile_step_start <= self._num_rollouts < settings.profile_step_end:
            yield
            return
        worker = f"{name}_rollout_{self._num_rollouts}_rank_{self._rank}"
        with _torch_profiler(None, self._directory, worker):
            yield

    def end_rollout(self, rollout_id: int) -> None:
        """Count a trained rollout, and write the traces and snapshots that are due."""
        self._num_rollouts += 1
        if self._overall is not None:
            self._overall.step()
            if self._num_rollouts >= self._settings.profile_step_end:
                self._overall.stop()
                self._overall = None
        last = self._settings.memory_snapshot_num_steps
        if self._memory is not None and last is not None and rollout_id >= last - 1:
            self._memory.stop()
            self._memory = None


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store the seconds that the block takes under ``name``, the device's work included."""
    started = time.monotonic()
    yield
    accelerator.current().synchronize()  # kernels may still be running
    seconds[name] = time.monotonic() - started


def _torch_profiler(settings: ProfileArgs | None, directory: Path, worker: str) -> Any:
    """A profiler whose trace, for TensorBoard and Perfetto, goes to ``directory``. ``settings`` None: no schedule."""
    schedule = None
    if settings is not None:
        start, end = settings.profile_step_start, settings.profile_step_end
        schedule = torch.profiler.schedule(
            # The rollout before the first profiled one is the warm-up.
            wait=max(start - 1, 0),
            warmup=min(start, 1),
            active=max(end - start, 1),
            repeat=1,
        )
    return torch.profiler.profile(
        schedule=schedule,
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(directory), worker_name=worker, use_gzip=True),
        record_shapes=True,
        with_stack=True,
        profile_memory=True,
        with_flops=True,
    )


def _memory_recorder(settings: ProfileArgs, rank: int) -> _AllocatorHistory | _Memray:
    stem = f"memory_snapshot_time{int(time.time())}_rank{rank}_{settings.memory_snapshot_path}"
    path = Path(settings.memory_snapshot_dir) / stem
    path.parent.mkdir(parents=True, exist_ok=True)
    return _Memray(path) if settings.memory_recorder == "memray" else _AllocatorHistory(path)


class _AllocatorHistory:
    """The history of torch's CUDA allocator, for pytorch.org/memory_viz."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> None:
        if accelerator.current().is_cpu:
            logger.warning("--record-memory-history records a device's allocator, and there is no device here")
            return
        torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES, stacks="all")
        # Also written when memory runs out, which is the most useful moment.
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._write())  # type: ignore[attr-defined]

    def stop(self) -> None:
        if not accelerator.current().is_cpu:
            self._write()
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self._path))  # type: ignore[no-untyped-call]
        logger.info("memory snapshot: %s", self._path)


class _Memray:
    """Every allocation of the process, native ones too."""

    def __init__(self, path: Path) -> None:
        try:
            import memray
        except ImportError:
            raise ConfigError("--memory-recorder memray needs the package memray: pip install memray.") from None
        self._path = path
        self._tracker = memray.Tracker(path, native_traces=True)

    def start(self) -> None:
        self._tracker.__enter__()

    def stop(self) -> None:
        self._tracker.__exit__(None, None, None)
        logger.info("memory profile: %s (memray flamegraph shows it)", self._path)
