"""One training batch out of many running groups: over-sampling, the dynamic filter, and an end.

wanted      target groups that the filter keeps
under way   at least as many groups as are still missing, fetched in chunks of --over-sampling-batch-size
dropped     groups that the filter rejects; a replacement is fetched
left over   groups still running, or finished too late, when the target is reached: their prompts go back to the
            data source, so none is lost. Their responses are thrown away, since the next batch has newer weights;
            with --partial-rollout they are kept, and the next rollout continues them

who waits for whom: this loop waits for the first of all running groups; a group waits for engines and rewards.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.rollout.failures import fresh_copy
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.grouping import as_groups
from slime.utils.async_utils import call_in_thread
from slime.utils.errors import DataError

__all__ = ["Collected", "collect", "first_index", "log_sample"]

logger = logging.getLogger(__name__)

_BAR_DELAY_S = 2.0
_MAX_DROPPED_PER_TARGET = 100


@dataclass
class Collected:
    """What a rollout ended with.

    Attributes:
        groups: the batch, sorted by sample index.
        all_groups: every finished group, dropped and surplus ones too, sorted by sample index.
        left_over: prompts of groups that are not in the batch and were not dropped, as they were fetched.
        metrics: counts of dropped and left-over groups.
    """

    groups: list[SampleGroup] = field(default_factory=list)
    all_groups: list[SampleGroup] = field(default_factory=list)
    left_over: list[SampleGroup] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def first_index(group: Any) -> int:
    """Sort key: number of the first sample. Ids that users made themselves come last, in the order they have."""
    index = next(iter_samples(group)).index
    return index if isinstance(index, int) else sys.maxsize


@dataclass
class _Progress:
    """The running groups of one rollout, and the prompts that they were made from."""

    prompts: dict[asyncio.Task[Any], SampleGroup] = field(default_factory=dict)
    dropped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def tasks(self) -> set[asyncio.Task[Any]]:
        return set(self.prompts)


async def collect(
    *,
    args: Any,
    target: int,
    chunk: int,
    group_size: int,
    fetch: Callable[[int], Sequence[Any]],
    submit: Callable[[list[SampleGroup]], list[asyncio.Task[Any]]],
    stop: Callable[[], Awaitable[None]],
    dynamic_filter: Callable[..., Any] | None,
    label: str,
    keeps_responses: bool = False,
) -> Collected:
    """Run groups until ``target`` of them are accepted.

    Args:
        chunk: groups fetched at a time.
        fetch: the data source's ``get_samples``; runs in a thread.
        submit: starts one task per group; the task's result is the finished group.
        stop: aborts whatever still runs. Called once, also when a group failed.
        label: what the progress bar is called.
        keeps_responses: left-over groups keep what was generated for them (``--partial-rollout``).

    Raises:
        DataError: no prompts, wrong group sizes, a filter that drops everything; and whatever a group raised.
    """
    result = Collected()
    gatherer = MetricGatherer()
    progress = _Progress()
    surplus: list[SampleGroup] = []
    bar = tqdm(total=target, desc=label, unit="group", delay=_BAR_DELAY_S, mininterval=1.0, leave=False)
    try:
        while len(result.groups) < target:
            while len(result.groups) + len(progress.prompts) < target:
                await _fetch_more(progress, fetch, submit, chunk, group_size)
            done, _ = await asyncio.wait(progress.tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                group = task.result()
                prompt = progress.prompts.pop(task)
                _check_size(group, group_size)
                result.all_groups.append(group)
                verdict = call_dynamic_filter(dynamic_filter, args, group)
                under_way = len(result.groups) + len(progress.prompts) + 1
                if should_drop_dynamic_filter_output(verdict, remaining_batch_size=under_way, target_data_size=target):
                    gatherer.on_dynamic_filter_drop(verdict.reason)
                    _count_drop(progress, verdict.reason, target)
                elif len(result.groups) < target:
                    result.groups.append(group)
                    bar.update()
                else:
                    surplus.append(group if keeps_responses else prompt)
    finally:
        bar.close()
        await stop()
    unfinished = [_unfinished(task, prompt, keeps_responses) for task, prompt in progress.prompts.items()]
    result.left_over = sorted([*surplus, *unfinished], key=first_index)
    result.groups.sort(key=first_index)
    result.all_groups.sort(key=first_index)
    result.metrics = dict(gatherer.collect())
    if result.left_over:
        result.metrics["rollout/left_over_groups"] = len(result.left_over)
        kept = sum(sample.response_length for sample in iter_samples(result.left_over))
        if keeps_responses:
            result.metrics["rollout/left_over_tokens"] = kept
    if progress.dropped:
        result.metrics["rollout/dropped_groups"] = progress.dropped
    return result


def _unfinished(task: asyncio.Task[Any], prompt: SampleGroup, keeps_responses: bool) -> SampleGroup:
    """The group as the aborted task left it; its prompt where the task could not end in order."""
    if keeps_responses and task.done() and not task.cancelled() and task.exception() is None:
        group: SampleGroup = task.result()
        return group
    return prompt


async def _fetch_more(
    progress: _Progress,
    fetch: Callable[[int], Sequence[Any]],
    submit: Callable[[list[SampleGroup]], list[asyncio.Task[Any]]],
    chunk: int,
    group_size: int,
) -> None:
    fetched = await call_in_thread(fetch, chunk)
    if not fetched:
        raise DataError("the data source returned no prompts, so the batch cannot be filled (--data-source-path)")
    groups = as_groups(fetched, lambda prompt: [fresh_copy(prompt) for _ in range(group_size)])
    for group in groups:
        _check_size(group, group_size)
    prompts: list[SampleGroup] = [[fresh_copy(sample) for sample in iter_samples(group)] for group in groups]
    progress.prompts.update(zip(submit(groups), prompts, strict=True))


def _check_size(group: Any, group_size: int) -> None:
    if not isinstance(group, list) or len(group) != group_size:
        size = len(group) if isinstance(group, list) else type(group).__name__
        raise DataError(
            f"a group has {size} entries, but --n-samples-per-prompt is {group_size}: the data source and custom "
            "generate functions must keep the size of groups"
        )


def _count_drop(progress: _Progress, reason: str | None, target: int) -> None:
    progress.dropped += 1
    progress.reasons[reason or "no reason given"] += 1
    if progress.dropped % (10 * target) == 0:
        logger.warning("--dynamic-sampling-filter-path has dropped %d groups: %s", progress.dropped, progress.reasons)
    if progress.dropped > _MAX_DROPPED_PER_TARGET * target:
        raise DataError(
            f"--dynamic-sampling-filter-path dropped {progress.dropped} groups for a batch of {target} "
            f"({dict(progress.reasons)}): the task is too easy or too hard for it, or the filter is wrong"
        )


def log_sample(sample: Sample, what: str) -> None:
    """Show one sample, so that a wrong template or reward is seen at once."""
    label = str(sample.label)[:100]
    logger.info("%s: %s | label: %s | reward: %s", what, [str(sample.prompt) + sample.response], label, sample.reward)
