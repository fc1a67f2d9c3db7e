"""Collects one training batch from many running groups: over-sampling, dynamic filter, abort of the rest.

wanted      the number of groups that the filter must accept
under way   at least as many groups as are still missing, fetched in chunks of --over-sampling-batch-size
dropped     groups that the filter rejects; a replacement is fetched
left over   groups that are still running, or finish too late, when the batch is full. Their prompts return to the data
            source, so none is lost. Their responses are discarded, because the next batch has newer weights. With
            --partial-rollout they are kept, and the next rollout continues them

Waits: :func:`collect` waits for the first of all running groups, and a group waits for engines and rewards.
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

from slime.data.sample import Sample, SampleGroup, as_groups, iter_samples
from slime.data.schedule import record
from slime.hooks import load_function
from slime.rollout.base_types import (
    Count,
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.direct_engines import keep_balanced
from slime.rollout.engine_request import EngineRequest, abort
from slime.rollout.failures import FailureBudget, fresh_copy, fresh_group
from slime.utils.async_utils import call_in_thread
from slime.utils.errors import DataError, DeadlineExceeded, EngineError

logger = logging.getLogger(__name__)

# Drops per group of the batch. With more of them the filter or the data is wrong.
_MAX_DROPPED_PER_TARGET = 100
# Share of responses cut at the length limit that is worth a warning.
_MOST_CUT = 0.9
_SILENCE_S = 300.0
# Time for aborted requests to return with their tokens, before their tasks are cancelled.
_PATIENCE_S = 2.0
_REPEAT_S = 0.1
_CANCEL_TIMEOUT_S = 10.0

Fetch = Callable[[int], Sequence[Any]]
Submit = Callable[[list[SampleGroup]], list[asyncio.Task[Any]]]
Judge = Callable[[SampleGroup], Awaitable[DynamicFilterOutput]]


@dataclass(frozen=True)
class BatchPlan:
    """The batch that :func:`collect` makes.

    Attributes:
        target: groups that the filter must accept.
        group_size: samples per group.
        chunk: groups fetched at a time.
        label: of the progress bar and of messages.
        keeps_responses: left-over groups keep their unfinished responses (``--partial-rollout``).
        max_failed_share: share of the batch's samples that may be given up (``--max-failed-share``).
    """

    target: int
    group_size: int
    chunk: int
    label: str
    keeps_responses: bool = False
    max_failed_share: float = 0.0


@dataclass
class Collected:
    """The result of a rollout.

    Attributes:
        groups: the batch, sorted by sample index.
        all_groups: every finished group, dropped and surplus ones too, sorted by sample index.
        left_over: the groups that are neither in the batch nor dropped, as they were fetched.
        metrics: counts of dropped and left-over groups.
    """

    groups: list[SampleGroup] = field(default_factory=list)
    all_groups: list[SampleGroup] = field(default_factory=list)
    left_over: list[SampleGroup] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def first_index(group: Any) -> int:
    """Sort key: the index of the first sample. Groups whose index is not a number come last, in their order."""
    index = next(iter_samples(group)).index
    return index if isinstance(index, int) else sys.maxsize


class _Progress:
    """The running groups of one rollout, and the prompts that they were made from."""

    def __init__(self) -> None:
        self.prompts: dict[asyncio.Task[Any], SampleGroup] = {}
        # Finished tasks put themselves here: asyncio.wait would look at all of the thousands every time.
        self._done: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()

    def add(self, tasks: Sequence[asyncio.Task[Any]], prompts: Sequence[SampleGroup]) -> None:
        for task, prompt in zip(tasks, prompts, strict=True):
            self.prompts[task] = prompt
            task.add_done_callback(self._done.put_nowait)

    async def next(self) -> Any:
        """The next finished group. Raises the error of its task."""
        task = None
        while task is None:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    task = await self._done.get()
            except TimeoutError:  # users' generate functions may work long, but a hang must be visible
                waiting = [first_index(prompt) for prompt in self.prompts.values()]
                logger.warning(
                    "no group has finished for %g s; %d are under way, those of the samples %s: does a generate "
                    "function or a tool hang?",
                    _SILENCE_S,
                    len(waiting),
                    f"{waiting[:8]}{' ...' if len(waiting) > 8 else ''}",
                )
        group = task.result()
        del self.prompts[task]
        return group


class Drops:
    """Counts the groups that the dynamic filter rejected in one rollout, and limits their number.

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
        self._num_tokens += _num_tokens(group)
        self._reasons[reason or "no reason given"] += 1
        self._gatherer.on_dynamic_filter_drop(reason)
        # Not every drop: a selective filter would fill the log.
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


@dataclass(frozen=True)
class BatchHooks:
    """The user's functions for groups and batches, and their ``args``. In threads: other groups and evaluations run."""

    args: Any
    dynamic_filter: Callable[..., Any] | None = None

    async def judge(self, group: SampleGroup) -> DynamicFilterOutput:
        """The filter's verdict."""
        if self.dynamic_filter is None:
            return DynamicFilterOutput(keep=True)
        return await call_in_thread(call_dynamic_filter, self.dynamic_filter, self.args, group)

    async def finish(self, groups: list[Any], all_groups: list[Any], data_source: Any) -> None:
        """Call ``--rollout-sample-filter-path`` and ``--rollout-all-samples-process-path`` for a full batch."""
        if (path := self.args.rollout_sample_filter_path) is not None:
            await call_in_thread(load_function(path, "filter"), self.args, groups)
        if (path := self.args.rollout_all_samples_process_path) is not None:
            await call_in_thread(load_function(path), self.args, sorted(all_groups, key=first_index), data_source)


async def collect(
    plan: BatchPlan,
    *,
    fetch: Fetch,
    submit: Submit,
    judge: Judge,
    stop: Callable[[], Awaitable[Any]],
    workers_url: str = "",
    requests: Collection[EngineRequest] = (),
) -> Collected:
    """Run groups until ``plan.target`` of them are accepted.

    Args:
        fetch: ``get_samples`` of the data source, runs in a thread.
        submit: starts one task per group. The result of a task is the finished group.
        judge: the dynamic filter.
        stop: aborts everything that still runs. Called once, also after an error.
        workers_url: route of the router that lists the engines.
        requests: those under way, which may move from one engine to another (:mod:`slime.rollout.direct_engines`).

    Raises:
        DataError: no prompts, wrong group sizes, a filter that drops everything, too many failed samples. Also the
            error of a group.
    """
    result = Collected()
    drops = Drops(plan.target)
    failures = FailureBudget(plan.max_failed_share, plan.target * plan.group_size)
    progress = _Progress()
    count = Count(plan.target, "groups")
    balancing = asyncio.create_task(keep_balanced(workers_url, requests)) if workers_url else None
    try:
        while len(result.groups) < plan.target:
            # Groups under way count as if they were accepted, so less than one chunk too many is under way.
            while len(result.groups) + len(progress.prompts) < plan.target:
                await _fetch_more(plan, progress, fetch, submit)
            group = await progress.next()
            _check_size(group, plan.group_size)
            failures.check(group)
            result.all_groups.append(group)
            verdict = await judge(group)
            # +1 is this group: ``progress`` has removed it, and it is not accepted yet.
            under_way = len(result.groups) + len(progress.prompts) + 1
            if should_drop_dynamic_filter_output(verdict, remaining_batch_size=under_way, target_data_size=plan.target):
                drops.add(group, verdict.reason)
            else:
                result.groups.append(group)
                count.add()
    finally:
        count.close()
        if balancing is not None:
            balancing.cancel()
        # Also after an error: requests that still run would occupy the engines during the next call.
        await stop()
    unfinished = [_unfinished(task, prompt, plan.keeps_responses) for task, prompt in progress.prompts.items()]
    result.left_over = sorted(unfinished, key=first_index)
    if plan.keeps_responses:
        record("aborted", result.left_over)
    late = [group for group in map(_finished_too_late, progress.prompts) if group is not None]
    result.all_groups = sorted(result.all_groups + late, key=first_index)
    result.groups.sort(key=first_index)
    _warn_if_cut(result.groups, plan.label)
    result.metrics = drops.metrics() | _counts(result, failures.num_failed)
    if plan.keeps_responses and result.left_over:
        result.metrics["rollout/left_over_tokens"] = _num_tokens(result.left_over)
    elif not plan.keeps_responses and (discarded := _num_tokens(late)):
        result.metrics["rollout/discarded_tokens"] = discarded
    return result


async def _fetch_more(plan: BatchPlan, progress: _Progress, fetch: Fetch, submit: Submit) -> None:
    fetched = await call_in_thread(fetch, plan.chunk)
    if not fetched:
        raise DataError("the data source returned no prompts, so the batch cannot be filled (--data-source-path)")
    groups = as_groups(fetched, lambda prompt: [fresh_copy(prompt) for _ in range(plan.group_size)])
    for group in groups:
        _check_size(group, plan.group_size)
    # Generation changes the groups, and left-over prompts must return to the data source unchanged.
    prompts: list[SampleGroup] = [fresh_group(group) for group in groups]
    progress.add(submit(groups), prompts)


def _check_size(group: Any, group_size: int) -> None:
    if not isinstance(group, list) or len(group) != group_size:
        size = len(group) if isinstance(group, list) else type(group).__name__
        raise DataError(
            f"a group has {size} entries, but --n-samples-per-prompt is {group_size}: the data source and custom "
            "generate functions must keep the size of groups"
        )


def _unfinished(task: asyncio.Task[Any], prompt: SampleGroup, keeps_responses: bool) -> SampleGroup:
    """The group of an aborted task, or its prompt if the task was cancelled or failed."""
    if keeps_responses and task.done() and not task.cancelled() and task.exception() is None:
        group: SampleGroup = task.result()
        return group
    return prompt


def _finished_too_late(task: asyncio.Task[Any]) -> SampleGroup | None:
    """The group of a task that was already complete when the batch was full."""
    if not task.done() or task.cancelled() or task.exception() is not None:
        return None
    group: SampleGroup = task.result()
    # An abort returns these with part of a response.
    ends = (Sample.Status.PENDING, Sample.Status.ABORTED)
    return None if any(sample.status in ends for sample in iter_samples(group)) else group


def _num_tokens(groups: Any) -> int:
    return sum(sample.response_length for sample in iter_samples(groups))


_cut_before: list[str] = []
"""The last batch, if most of its responses were cut."""


def _warn_if_cut(groups: list[SampleGroup], label: str) -> None:
    """Warn if most responses are cut, once for batches in a row. The log has a line for each of them."""
    samples = list(iter_samples(groups))
    cut = sum(sample.truncated for sample in samples)
    is_known = bool(_cut_before)
    _cut_before[:] = [label] if cut > _MOST_CUT * len(samples) else []
    if _cut_before:
        logger.log(
            logging.INFO if is_known else logging.WARNING,
            "%s: %d of %d responses were cut at --rollout-max-response-len: too short, or does the model not know "
            "how to end (--rollout-stop, --rollout-stop-token-ids)?",
            label,
            cut,
            len(samples),
        )


def _counts(result: Collected, num_failed: int) -> dict[str, float]:
    counts = {
        "failed_samples": num_failed,
        "failed_generations": sum(s.metadata.get("failed_attempts", 0) for s in iter_samples(result.groups)),
        "left_over_groups": len(result.left_over),
    }
    return {f"rollout/{name}": count for name, count in counts.items() if count}


def log_sample(sample: Sample, what: str) -> None:
    """Log one sample, which shows a wrong template or reward at once."""
    label = str(sample.label)[:100]
    logger.info("%s: %s | label: %s | reward: %s", what, [str(sample.prompt) + sample.response], label, sample.reward)


def note_start(groups: list[SampleGroup], rollout_id: int) -> None:
    """Note in the metadata in which rollout a response was begun."""
    for sample in iter_samples(groups):
        if sample.response_length > 0:
            sample.metadata.setdefault("start_rollout_id", rollout_id)


def mask_older_tokens(sample: Sample | list[Sample]) -> None:
    """Mask the tokens of earlier rollouts: older weights made them. They stay in the context."""
    for item in iter_samples(sample):
        if item.response_length > 0:
            item.loss_mask = [0] * item.response_length


async def end_tasks(
    tasks: Collection[asyncio.Task[SampleGroup]],
    workers_url: str,
    patience_s: float | None = None,
    *,
    requests: Collection[EngineRequest] | None = None,
) -> list[SampleGroup]:
    """Abort requests until the tasks are done or ``patience_s`` (two seconds) have passed, then cancel the others.

    Never raises, because it also runs after the death of an engine.

    Args:
        workers_url: route of the router that lists the engines.
        requests: the requests to abort, read again in every round; None: all requests of the engines.

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
        # With a limit: a user's function may suppress its cancellation, and the rollout must end nevertheless.
        await asyncio.wait(running, timeout=_CANCEL_TIMEOUT_S)
        logger.info("ended %d groups that were still running", len(running))
    # The rollout itself raises one error. asyncio would report the others as never retrieved, unless they are read.
    failed = {task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None}
    return [task.result() for task in returned if task not in failed]


async def _abort_requests(
    workers_url: str,
    running: Collection[asyncio.Task[Any]],
    patience_s: float,
    requests: Collection[EngineRequest] | None,
) -> None:
    started = time.monotonic()
    sent: set[str] = set()
    # Repeated, because a request may be on its way to the engine while the others are aborted.
    while time.monotonic() - started < patience_s and not all(task.done() for task in running):
        try:
            everything = [{"abort_all": True}]
            await abort(workers_url, everything if requests is None else [{"rid": r} for r in _rids(requests, sent)])
        except (EngineError, DeadlineExceeded) as error:
            # The caller disconnects them, and engines drop the requests of closed connections.
            logger.warning("running requests could not be aborted and are disconnected instead: %s", error)
            return
        await asyncio.wait(running, timeout=_REPEAT_S)


def _rids(requests: Collection[EngineRequest], sent: set[str]) -> list[str]:
    """The ids to abort now: those of lost attempts once, the last one of each request in every round."""
    # The last attempt may reach the engine after the abort, so its id is sent again.
    rids = [rid for request in requests for rid in request.rids if rid not in sent or rid == request.rids[-1]]
    sent.update(rids)
    return rids


async def gather(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """The results in order. The first failure cancels the others."""
    try:
        return list(await asyncio.gather(*tasks))
    # Also for CancelledError: the samples of a cancelled group must not keep their slots.
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
