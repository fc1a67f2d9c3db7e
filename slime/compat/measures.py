"""Times and metrics of users' training code: the process-wide timer, and the reduction of values to one metric.

``timer("name")`` goes around a block or a function. The reductions combine values of micro-batches and ranks. The
Megatron backend reduces in ``step`` and ``rollout_report``. Apart from the collective of the given group, they have no
side effects.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from slime.config.groups import with_values
from slime.observability.sinks import TensorboardSink
from slime.observability.tracking import event_directory
from slime.utils import accelerator
from slime.utils.misc import SingletonMeta

Function = TypeVar("Function", bound=Callable[..., Any])


class _TensorboardAdapter(metaclass=SingletonMeta):
    """Event files for users' code, one writer per process, in the folder of the run's events.

    Raises:
        ValueError: neither ``--tb-project-name`` nor TENSORBOARD_DIR.
    """

    def __init__(self, args: Namespace) -> None:
        if not args.tb_project_name and not os.environ.get("TENSORBOARD_DIR"):
            raise ValueError("TensorBoard needs --tb-project-name, or the environment variable TENSORBOARD_DIR.")
        directory = event_directory(with_values(args, use_tensorboard=True), time.strftime("%Y%m%d_%H%M%S"))
        assert directory is not None, "the flag asks for events"
        self._sink = TensorboardSink(directory)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._sink.log(data, "", step)

    def finish(self) -> None:
        self._sink.close()


class Timer(metaclass=SingletonMeta):
    """Wall-clock seconds by name, one instance per process.

    Starting a phase that runs, or ending one that does not, is an assertion error.

    with timer("train"):
        ...
    seconds = timer.pop()   # {"train": 1.2}; the next report starts from zero
    """

    def __init__(self) -> None:
        self._total: dict[str, float] = {}
        # By name, not by thread: two threads must not time the same name at once.
        self._started: dict[str, float] = {}

    def start(self, name: str) -> None:
        assert name not in self._started, f"timer {name!r} is already running"
        self._started[name] = time.monotonic()

    def end(self, name: str) -> float:
        """Stop ``name`` and add its seconds to the total. Returns the seconds."""
        assert name in self._started, f"timer {name!r} is not running"
        seconds = time.monotonic() - self._started.pop(name)
        self.add(name, seconds)
        return seconds

    def add(self, name: str, seconds: float) -> None:
        self._total[name] = self._total.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block. A block that raises counts as well."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)

    def context(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Time a block."""
        return self(name)

    def log_dict(self) -> dict[str, float]:
        """Totals in seconds by name, without the phases that are still running."""
        return dict(self._total)

    def reset(self, name: str | None = None) -> None:
        """Forget one total, or all."""
        if name is None:
            self._total.clear()
        else:
            self._total.pop(name, None)

    def pop(self) -> dict[str, float]:
        """Totals since the last ``pop``."""
        totals = self.log_dict()
        self.reset()
        return totals


@overload
def timer(name: str) -> contextlib.AbstractContextManager[None]: ...
@overload
def timer(name: Function) -> Function: ...
def timer(name: Any) -> Any:
    """Time a block, ``with timer("x")``, or every call of a function, ``@timer``, under the function's name."""
    if isinstance(name, str):
        return Timer().context(name)
    function = name

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with Timer().context(function.__name__):
            return function(*args, **kwargs)

    return timed


@contextlib.contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Leave a block out of the running phase ``name``."""
    Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)  # also after an error: the outer block ends the phase and asserts that it runs


def with_defer(deferred: Callable[[], Any]) -> Callable[[Function], Function]:
    """Decorator: call ``deferred`` after the function, also if it raises."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                deferred()

        return wrapped  # type: ignore[return-value]

    return decorate


def reduce_train_step_metrics(
    losses_reduced: Sequence[Mapping[str, Any]],
    *,
    calculate_per_token_loss: bool,
    step_global_batch_size: int,
    cp_size: int,
    dp_with_cp_group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """The metrics of one optimizer step.

    Args:
        losses_reduced: per micro-batch ``{"keys": names, "values": [num_tokens, value, ...]}``. Values are sums over
            the rollouts or tokens of the micro-batch.
        calculate_per_token_loss: mean over tokens, else over the step's ``step_global_batch_size`` rollouts.
        cp_size: number of context-parallel ranks.
        dp_with_cp_group: all ranks of data and context parallelism. None for a single process.
    """
    # Values have no names in the reduction: all micro-batches and ranks must use the same keys in the same order.
    names = list(losses_reduced[0]["keys"])
    total = torch.stack([torch.as_tensor(loss["values"], dtype=torch.float32) for loss in losses_reduced]).sum(0)
    if dp_with_cp_group is not None:
        total = total.to(accelerator.current().device())  # NCCL cannot reduce tensors on the CPU
        dist.all_reduce(total, group=dp_with_cp_group)
    tokens, *values = total.tolist()
    if calculate_per_token_loss:
        # Every context-parallel rank counts all tokens of a shared sample, so the sum has each token cp_size times.
        return {name: value * cp_size / max(tokens, 1.0) for name, value in zip(names, values, strict=True)}
    return {name: value / step_global_batch_size for name, value in zip(names, values, strict=True)}


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> tuple[float, float]:
    """(sum, count) that one rank adds to a mean over all rollouts.

    Args:
        per_rank_reducer_sum: sum over this rank's rollouts of per-rollout means, with its part of their tokens.
    """
    return cp_size * per_rank_reducer_sum, num_rollouts_in_rollout / dp_size


def gather_and_reduce_log_dict(
    log_dict: Mapping[str, Any], *, dp_size: int, dp_src_rank: int, dp_group: dist.ProcessGroup | None
) -> dict[str, float] | None:
    """The metrics of all ranks, under the names of the source rank. None on the other ranks.

    ``(sum, count)`` becomes the sum of sums over the sum of counts, or 0 for a count of 0. A number becomes the mean
    over ranks.
    """
    gathered: list[Any] | None = [dict(log_dict)]
    if dp_group is not None:
        is_source = dist.get_rank() == dp_src_rank
        gathered = [None] * dp_size if is_source else None
        dist.gather_object(dict(log_dict), gathered, dst=dp_src_rank, group=dp_group)
    if gathered is None:
        return None
    return {name: _reduce([rank[name] for rank in gathered]) for name in log_dict}


def _reduce(values: Sequence[Any]) -> float:
    if not isinstance(values[0], tuple):
        return float(sum(values) / len(values))
    total, count = (float(sum(part)) for part in zip(*values, strict=True))
    return total / count if count else 0.0
