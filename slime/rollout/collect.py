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
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from slime.data.sample import Sample, SampleGroup, as_groups, iter_samples
from slime.hooks.load import load_function
from slime.rollout.engine_request import EngineRequest
from slime.rollout.failures import FailureBudget, fresh_copy
from slime.rollout.filters import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.settings import setting
from slime.utils.async_utils import call_in_thread
from slime.utils.errors import DataError, DeadlineExceeded, EngineError
from slime.utils.http_utils import get, post

__all__ = [
    "Collected",
    "Drops",
    "apply_filter",
    "call_batch_hooks",
    "collect",
    "end_tasks",
    "first_index",
    "gather",
    "log_sample",
    "mask_older_tokens",
    "note_start",
]

logger = logging.getLogger(__name__)

_BAR_DELAY_S = 2.0
_MAX_DROPPED_PER_TARGET = 100
_MOST_CUT = 0.9
_SILENCE_S = 300.0


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


class _Progress:
    """The running groups of one rollout, and the prompts that they were made from.

    Tasks report themselves when they are done: waiting for the first of thousands again and again would look at all of
    them every time.
    """

    def __init__(self) -> None:
        self.prompts: dict[asyncio.Task[Any], SampleGroup] = {}
        self._done: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()

    def add(self, tasks: Sequence[asyncio.Task[Any]], prompts: Sequence[SampleGroup]) -> None:
        for task, prompt in zip(tasks, prompts, strict=True):
            self.prompts[task] = prompt
            task.add_done_callback(self._done.put_nowait)

    async def next(self) -> tuple[Any, SampleGroup]:
        """The next finished group and its prompt. Raises what the group raised.

        Users' generate functions may work long (--custom-generate-timeout), but not unnoticed.
        """
        task = None
        while task is None:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    task = await self._done.get()
            except TimeoutError:
                waiting = [first_index(prompt) for prompt in self.prompts.values()]
                logger.warning(
                    "no group has finished for %g s; %d are under way, those of the samples %s: does a generate "
                    "function or a tool hang?",
                    *(_SILENCE_S, len(waiting), f"{waiting[:8]}{' ...' if len(waiting) > 8 else ''}"),
                )
        group = task.result()
        return group, self.prompts.pop(task)


class Drops:
    """What the dynamic filter rejected in one rollout: counted, and with an end.

    Args:
        target: groups that the batch needs.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._num_groups = 0
        self._num_tokens = 0
        self._reasons: Counter[str] = Counter()
        self._gatherer = MetricGatherer()

    def add(self, group: SampleGroup, reason: str | None) -> None:
        """Count a group.

        Raises:
            DataError: the filter drops nearly everything.
        """
        self._num_groups += 1
        self._num_tokens += _tokens(group)
        self._reasons[reason or "no reason given"] += 1
        self._gatherer.on_dynamic_filter_drop(reason)
        if self._num_groups % (10 * self._target) == 0:
            logger.warning(
                "--dynamic-sampling-filter-path has dropped %d groups: %s", self._num_groups, dict(self._reasons)
            )
        if self._num_groups > _MAX_DROPPED_PER_TARGET * self._target:
            raise DataError(
                f"--dynamic-sampling-filter-path dropped {self._num_groups} groups for a batch of {self._target} "
                f"({dict(self._reasons)}): the task is too easy or too hard for it, or the filter is wrong"
            )

    def metrics(self) -> dict[str, float]:
        counts: dict[str, float] = {"dropped_groups": self._num_groups, "dropped_tokens": self._num_tokens}
        return {**self._gatherer.collect(), **{f"rollout/{name}": count for name, count in counts.items() if count}}


async def apply_filter(dynamic_filter: Callable[..., Any] | None, args: Any, group: SampleGroup) -> DynamicFilterOutput:
    """The filter's verdict. Users' filters run in a thread, one at a time: other groups go on meanwhile."""
    if dynamic_filter is None:
        return DynamicFilterOutput(keep=True)
    return await call_in_thread(call_dynamic_filter, dynamic_filter, args, group)


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
    max_failed_share: float = 0.0,
) -> Collected:
    """Run groups until ``target`` of them are accepted.

    Args:
        chunk: groups fetched at a time.
        fetch: the data source's ``get_samples``; runs in a thread.
        submit: starts one task per group; the task's result is the finished group.
        stop: aborts whatever still runs. Called once, also when a group failed.
        label: what the progress bar is called.
        keeps_responses: left-over groups keep what was generated for them (``--partial-rollout``).
        max_failed_share: of the batch's samples that may be given up (``--max-failed-share``).

    Raises:
        DataError: no prompts, wrong group sizes, a filter that drops everything, too many failed samples; and whatever
            a group raised.
    """
    result = Collected()
    drops = Drops(target)
    failures = FailureBudget(max_failed_share, target * group_size)
    progress = _Progress()
    bar = tqdm(total=target, desc=label, unit="group", delay=_BAR_DELAY_S, mininterval=1.0, leave=False)
    try:
        while len(result.groups) < target:
            while len(result.groups) + len(progress.prompts) < target:
                await _fetch_more(progress, fetch, submit, chunk, group_size)
            group, _ = await progress.next()
            _check_size(group, group_size)
            failures.check(group)
            result.all_groups.append(group)
            verdict = await apply_filter(dynamic_filter, args, group)
            under_way = len(result.groups) + len(progress.prompts) + 1
            if should_drop_dynamic_filter_output(verdict, remaining_batch_size=under_way, target_data_size=target):
                drops.add(group, verdict.reason)
            else:
                result.groups.append(group)
                bar.update()
    finally:
        bar.close()
        await stop()
    unfinished = [_unfinished(task, prompt, keeps_responses) for task, prompt in progress.prompts.items()]
    result.left_over = sorted(unfinished, key=first_index)
    late = [group for group in map(_finished_too_late, progress.prompts) if group is not None]
    result.all_groups += late
    result.groups.sort(key=first_index)
    _warn_if_cut(result.groups, label)
    result.all_groups.sort(key=first_index)
    result.metrics = drops.metrics() | _counts(result, failures.num_failed, keeps_responses)
    if not keeps_responses and (discarded := _tokens(late)):
        result.metrics["rollout/discarded_tokens"] = discarded
    return result


def _tokens(groups: Any) -> int:
    return sum(sample.response_length for sample in iter_samples(groups))


def _warn_if_cut(groups: list[SampleGroup], label: str) -> None:
    samples = list(iter_samples(groups))
    cut = sum(sample.truncated for sample in samples)
    if cut > _MOST_CUT * len(samples):
        logger.warning(
            "%s: %d of %d responses were cut at --rollout-max-response-len: too short, or does the model not know "
            "how to end (--rollout-stop, --rollout-stop-token-ids)?",
            *(label, cut, len(samples)),
        )


def _counts(result: Collected, num_failed: int, keeps_responses: bool) -> dict[str, float]:
    counts = {
        "failed_samples": num_failed,
        "failed_generations": sum(s.metadata.get("failed_attempts", 0) for s in iter_samples(result.groups)),
        "left_over_groups": len(result.left_over),
    }
    metrics: dict[str, float] = {f"rollout/{name}": count for name, count in counts.items() if count}
    if keeps_responses and result.left_over:
        metrics["rollout/left_over_tokens"] = sum(sample.response_length for sample in iter_samples(result.left_over))
    return metrics


def _finished_too_late(task: asyncio.Task[Any]) -> SampleGroup | None:
    """The group of a task that was done by itself when the batch was full."""
    if not task.done() or task.cancelled() or task.exception() is not None:
        return None
    group: SampleGroup = task.result()
    ends = (Sample.Status.PENDING, Sample.Status.ABORTED)
    return None if any(sample.status in ends for sample in iter_samples(group)) else group


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
    progress.add(submit(groups), prompts)


def _check_size(group: Any, group_size: int) -> None:
    if not isinstance(group, list) or len(group) != group_size:
        size = len(group) if isinstance(group, list) else type(group).__name__
        raise DataError(
            f"a group has {size} entries, but --n-samples-per-prompt is {group_size}: the data source and custom "
            "generate functions must keep the size of groups"
        )


async def call_batch_hooks(args: Any, groups: list[Any], all_groups: list[Any], data_source: Any) -> None:
    """``--rollout-sample-filter-path`` and ``--rollout-all-samples-process-path``, when the batch is full. In a thread:
    an evaluation may be running on the same loop."""
    if (path := setting(args, "rollout_sample_filter_path")) is not None:
        await call_in_thread(load_function(path, "filter"), args, groups)
    if (path := setting(args, "rollout_all_samples_process_path")) is not None:
        await call_in_thread(load_function(path), args, sorted(all_groups, key=first_index), data_source)


def log_sample(sample: Sample, what: str) -> None:
    """Show one sample, so that a wrong template or reward is seen at once."""
    label = str(sample.label)[:100]
    logger.info("%s: %s | label: %s | reward: %s", what, [str(sample.prompt) + sample.response], label, sample.reward)


# Ending what a rollout left running: engines drop their requests, tasks return or are cancelled; and what is noted on
# responses that the next rollout continues.
#
# The router has no route for it, so each worker is asked. Nothing here raises: it also runs after an engine died.


_PATIENCE_S = 2.0
_REPEAT_S = 0.1
_REQUEST_TIMEOUT_S = 5.0
_CANCEL_TIMEOUT_S = 10.0
_MOST_AT_ONCE = 64


async def end_tasks(
    tasks: Collection[asyncio.Task[SampleGroup]],
    workers_url: str,
    patience_s: float | None = None,
    *,
    requests: Collection[EngineRequest] | None = None,
) -> list[SampleGroup]:
    """Abort requests until the tasks are done or ``patience_s`` (two seconds) have passed, then cancel the others.

    Args:
        requests: those to abort, as they are at that time; None: all that the engines have.

    Returns:
        The groups of the tasks that were running and returned.
    """
    running = {task for task in tasks if not task.done()}
    if running:
        await _abort_requests(workers_url, running, _PATIENCE_S if patience_s is None else patience_s, requests)
    returned = [task for task in running if task.done() and not task.cancelled()]
    if running:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_CANCEL_TIMEOUT_S)
        logger.info("ended %d groups that were still running", len(running))
    # One error is raised by the rollout itself; asyncio would report the others as never retrieved.
    failed = {task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None}
    return [task.result() for task in returned if task not in failed]


async def gather(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Results in order; the first failure cancels the others."""
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def note_start(groups: list[SampleGroup], rollout_id: int) -> None:
    """Remember in which rollout a response was begun."""
    for sample in iter_samples(groups):
        if sample.response_length > 0:
            sample.metadata.setdefault("start_rollout_id", rollout_id)


def mask_older_tokens(sample: Sample | list[Sample]) -> None:
    """Tokens from earlier rollouts came from older weights: they stay in the context but are not trained on."""
    for item in iter_samples(sample):
        if item.response_length > 0:
            item.loss_mask = [0] * item.response_length


async def _abort_requests(
    workers_url: str,
    running: Collection[asyncio.Task[Any]],
    patience_s: float,
    requests: Collection[EngineRequest] | None,
) -> None:
    """Repeated, because a request may be on its way while the others are dropped. A failure is only logged: the caller
    disconnects what still runs, and engines drop requests of clients that are gone.
    """
    started = time.monotonic()
    places = asyncio.Semaphore(_MOST_AT_ONCE)
    told: set[str] = set()
    while time.monotonic() - started < patience_s and not all(task.done() for task in running):
        try:
            workers = (await get(workers_url, timeout_s=_REQUEST_TIMEOUT_S))["workers"]
            bodies = [{"abort_all": True}] if requests is None else [{"rid": rid} for rid in _rids(requests, told)]
            await asyncio.gather(*(_abort(worker["url"], body, places) for worker in workers for body in bodies))
        except (EngineError, DeadlineExceeded, KeyError, TypeError) as error:
            logger.warning("running requests could not be aborted and are disconnected instead: %s", error)
            return
        await asyncio.wait(running, timeout=_REPEAT_S)


def _rids(requests: Collection[EngineRequest], told: set[str]) -> list[str]:
    """Ids to abort now: those of attempts that got lost once, the last one of each request again and again."""
    rids = [rid for request in requests for rid in request.rids if rid not in told or rid == request.rids[-1]]
    told.update(rids)
    return rids


async def _abort(url: str, body: dict[str, Any], places: asyncio.Semaphore) -> None:
    async with places:
        await post(f"{url}/abort_request", body, max_retries=0, timeout_s=_REQUEST_TIMEOUT_S)
