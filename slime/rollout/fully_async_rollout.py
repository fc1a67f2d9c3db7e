"""Generation that never stops: a worker keeps groups in flight, and a rollout takes the next finished ones.

For ``train_async.py --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async``.

Waits:

worker (thread and loop)  for free slots, engines and rewards; a finished group or the consumer wakes it
consumer (one rollout)    for --rollout-batch-size finished groups, oldest first
weight sync               for nothing. It aborts the running groups. They return to the data source with their tokens,
                          and the new weights continue them before a new prompt is drawn

Staleness. A group that rollout r takes and that weights of version v began lags r - v rollouts. With
``--max-weight-staleness N`` at most (N + 1) batches are under way, including the finished groups of the current batch
(the bound of AReaL, arXiv:2505.24298, sec. 5.1). A group that still lags more is discarded, and its prompt is drawn
again.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import queue
import threading
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.data.sample import SampleGroup, iter_samples
from slime.data.schedule import record
from slime.hooks import load_optional
from slime.rollout.base_types import RolloutFnTrainOutput, complete_args
from slime.rollout.collect import BatchHooks, Drops, first_index, log_sample
from slime.rollout.custom_generate import is_cut
from slime.rollout.failures import FailureBudget, fresh_group, without_response
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import Deadline, call_in_thread, run
from slime.utils.errors import ConfigError, DataError, reported
from slime.utils.http_utils import get_rollout_num_engines, init_http_client

logger = logging.getLogger(__name__)

_MAX_FAILURES_IN_A_ROW = 3
# Stale groups per group of the batch. With more of them the bound cannot be kept, and the rollout would never end.
_MAX_STALE_PER_TARGET = 20
_STOP_TIMEOUT_S = 5.0
_DRAIN_TIMEOUT_S = 30.0

_worker_lock = threading.Lock()
_global_worker: AsyncRolloutWorker | None = None


class AsyncRolloutWorker:
    """Keeps up to ``concurrency`` groups in flight.

    Attributes:
        output_queue: finished groups as ``(number, group)``; numbers count up in the order the groups were begun.
        running: from :meth:`start` to :meth:`stop`.
        worker_thread: runs the worker's event loop.
        state: shared by all requests of the process.
    """

    def __init__(self, args: Namespace, data_buffer: Any, concurrency: int = 10) -> None:
        self.args = complete_args(args)
        self.data_buffer = data_buffer
        self.concurrency = concurrency
        self.output_queue: queue.Queue[tuple[int, SampleGroup]] = queue.Queue()
        self.state = GenerateState(args)
        self.running = False
        self.worker_thread: threading.Thread | None = None
        self._prompts: dict[int, SampleGroup] = {}
        self._active: set[asyncio.Task[Any]] = set()
        self._next = 0
        self._num_held = 0
        self._failures = 0
        self._error: BaseException | None = None
        self._change = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None

    def patience(self) -> tuple[float, str]:
        """Seconds after which a group must be finished, and the flag that decides them."""
        args, rewards_s = self.args, 2 * self.args.rm_timeout
        if args.custom_generate_function_path is None:
            if args.rollout_request_timeout is None:
                return args.rollout_timeout, "--rollout-timeout"
            return args.rollout_request_timeout + rewards_s, "--rollout-request-timeout"
        attempts = 1 + args.max_sample_retries
        return attempts * args.custom_generate_timeout + rewards_s, "--custom-generate-timeout"

    def start(self) -> None:
        """Begin to generate."""
        self.running = True
        # A weight sync aborts the running requests. Their samples return to the data source instead of starting again.
        self.state.requeues_aborted = True
        # A daemon: a user's function that hangs must not keep the process alive.
        self.worker_thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True, name="fully-async")
        self.worker_thread.start()

    def stop(self) -> None:
        """Cancel the groups that are under way, and end."""
        self.running = False
        self._notify()
        if self.worker_thread is not None:
            self.worker_thread.join(_STOP_TIMEOUT_S)

    def queue_size(self) -> int:
        """The number of finished groups that no rollout has taken."""
        return self.output_queue.qsize()

    def get_completed_groups(self, limit: int | None = None, *, is_held: bool = False) -> list[tuple[int, SampleGroup]]:
        """Take finished groups, first in, first out, without waiting.

        Args:
            is_held: they count as under way until :meth:`release`, for ``--max-weight-staleness``.
        """
        taken: list[tuple[int, SampleGroup]] = []
        while limit is None or len(taken) < limit:
            # Counted before the group leaves the queue, or the worker would see a free slot.
            self._num_held += is_held
            try:
                taken.append(self.output_queue.get_nowait())
            except queue.Empty:
                self._num_held -= is_held
                break
        self._notify()
        return taken

    def release(self, count: int | None = None) -> None:
        """Stop counting ``count`` discarded groups as held. None: all of them, because the batch is complete."""
        self._num_held -= self._num_held if count is None else count
        self._notify()

    def wait_completed(self, deadline: Deadline) -> None:
        """Wait for a finished group.

        Raises:
            DeadlineExceeded: none finished in time. Also the error that ended the worker.
        """
        with self._change:
            self._change.wait_for(
                lambda: self._error is not None or not self.output_queue.empty(), timeout=deadline.remaining
            )
        if self._error is not None:
            raise self._error
        if self.output_queue.empty():
            raise deadline.error(f"{len(self._prompts)} groups are under way")

    def put_back(self, group: SampleGroup) -> None:
        """Return a group to the data source, which draws it before new prompts."""
        self.data_buffer.add_samples([group])

    def drop(self, rollout_id: int, group: SampleGroup) -> None:
        """Report a group that will not be drawn again to the Data Buffer."""
        # A plain data source has no such method.
        if hasattr(self.data_buffer, "drop"):
            self.data_buffer.drop(rollout_id, [group])

    def prompt_of(self, number: int) -> SampleGroup:
        """The group as it was drawn."""
        return self._prompts.pop(number)

    def _notify(self) -> None:
        with self._change:
            self._change.notify_all()
        if self._loop is not None and self._wake is not None and not self._loop.is_closed():
            # asyncio.Event is not thread-safe.
            self._loop.call_soon_threadsafe(self._wake.set)

    def _num_free(self) -> int:
        """The number of groups that may be begun now."""
        # If the consumer is slow, at most 2 * concurrency groups are finished or under way.
        free = min(self.concurrency, 2 * self.concurrency - self.queue_size()) - len(self._active)
        staleness = self.args.max_weight_staleness
        if staleness is None:
            return free
        most: int = (staleness + 1) * self.args.rollout_batch_size
        return min(free, most - len(self._active) - self.queue_size() - self._num_held)

    async def _main(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        try:
            with reported(self._fail):
                while self.running and self._error is None:
                    # Cleared before the slots are counted: a change during the count sets it again and is not lost.
                    self._wake.clear()
                    while self.running and self._num_free() > 0:
                        if not await self._begin_one():
                            break
                    await self._wake.wait()
        finally:
            self.running = False
            active = list(self._active)
            for task in active:
                task.cancel()
            if active:
                await asyncio.wait(active, timeout=_DRAIN_TIMEOUT_S)
            # Wakes a waiting consumer, which then raises the error.
            with self._change:
                self._change.notify_all()

    def _fail(self, error: Exception) -> None:
        self._error = error  # the consumer raises it

    async def _begin_one(self) -> bool:
        groups = await call_in_thread(self.data_buffer.get_samples, 1)
        if not groups:
            # A group that is under way or finished may still return to the data source.
            if not self._active and self.output_queue.empty():
                raise DataError(
                    "the data source returned no prompts (--data-source-path): there is nothing to generate"
                )
            return False
        number, self._next = self._next, self._next + 1
        # Generation changes the group. A failed or stale group is drawn again from this copy.
        self._prompts[number] = fresh_group(groups[0])
        task = asyncio.create_task(
            generate_and_rm_group(self.args, groups[0], sampling_params=self.state.sampling_params.copy())
        )
        self._active.add(task)
        task.add_done_callback(self._make_done_cb(number))
        return True

    def _make_done_cb(self, gid: int) -> Callable[[Any], None]:
        def done(task: Any) -> None:
            with reported(self._fail):  # such as a schedule that cannot be written. asyncio would only log it
                if not task.cancelled():
                    self._on_done(gid, task)
            self._active.discard(task)
            self._notify()

        return done

    def _on_done(self, gid: int, task: Any) -> None:
        error = task.exception()
        if error is not None:
            self._on_failure(gid, error)
        elif any(map(is_cut, iter_samples(task.result()))):
            self._prompts.pop(gid, None)
            record("aborted", [task.result()])
            self._give_back(task.result())
        else:
            self._failures = 0
            self.output_queue.put((gid, task.result()))

    def _on_failure(self, gid: int, error: BaseException) -> None:
        # Each sample was already tried several times. Several failed groups in a row show a broken function or engine.
        self._failures += 1
        logger.warning("a group failed (%d in a row), its prompt is drawn again: %s", self._failures, error)
        if self._failures >= _MAX_FAILURES_IN_A_ROW:
            self._error = error
        else:
            record("retried", [self._prompts[gid]])
            self._give_back(self._prompts.pop(gid))

    def _give_back(self, group: SampleGroup) -> None:
        """Call :meth:`put_back` in a thread, because all other groups need the loop."""
        if self._loop is None:  # without a loop nothing can be blocked
            self.put_back(group)
            return
        # The group keeps its slot until it is back: otherwise the next draw would take a new prompt first.
        task = asyncio.create_task(call_in_thread(self.put_back, group))
        self._active.add(task)
        task.add_done_callback(self._on_given_back)

    def _on_given_back(self, task: Any) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()  # of the user's data source: the group is lost
        self._active.discard(task)
        self._notify()


def _get_global_worker(args: Namespace, data_buffer: Any) -> AsyncRolloutWorker:
    """The worker of the process; a new one if there is none or it ended."""
    global _global_worker
    with _worker_lock:
        worker = _global_worker
        if worker is None or worker.worker_thread is None or not worker.worker_thread.is_alive():
            concurrency = args.sglang_server_concurrency * get_rollout_num_engines(args)
            worker = AsyncRolloutWorker(args, data_buffer, max(1, concurrency // args.n_samples_per_prompt))
            worker.start()
            if _global_worker is None:
                atexit.register(_stop_global_worker)
            _global_worker = worker
        return worker


def _stop_global_worker() -> None:
    global _global_worker
    with _worker_lock:
        if _global_worker is not None:
            _global_worker.stop()
            _global_worker = None


async def _generate_rollout_async(args: Namespace, rollout_id: int, data_buffer: Any) -> RolloutFnTrainOutput:
    worker = _get_global_worker(args, data_buffer)
    worker.release()
    hooks = BatchHooks(args, load_optional(args.dynamic_sampling_filter_path, "filter"))
    drops = Drops(args.rollout_batch_size)
    metrics = {"rollout/stale_groups": 0, "rollout/stale_tokens": 0}
    failures = FailureBudget(args.max_failed_share, args.rollout_batch_size * args.n_samples_per_prompt)
    groups: list[SampleGroup] = []
    all_groups: list[SampleGroup] = []
    limit_s, flag = worker.patience()
    bound = args.max_weight_staleness
    try:
        while len(groups) < args.rollout_batch_size:
            deadline = Deadline(limit_s, "the next group of the fully-async worker", flag)
            await call_in_thread(worker.wait_completed, deadline)
            wanted = args.rollout_batch_size - len(groups)
            for number, group in sorted(worker.get_completed_groups(wanted, is_held=True)):
                prompt = worker.prompt_of(number)
                if _lag(rollout_id, group) > (math.inf if bound is None else bound):
                    metrics["rollout/stale_groups"] += 1
                    metrics["rollout/stale_tokens"] += sum(sample.response_length for sample in iter_samples(group))
                    # Without the tokens of old weights, or the group would be stale again.
                    # One sample per entry: the rows of one execution came from one sample.
                    again = [without_response(next(iter_samples(entry))) for entry in prompt]
                    record("stale", [again])
                    await call_in_thread(worker.put_back, again)
                    worker.release(1)
                    _check_not_hopeless(rollout_id, metrics["rollout/stale_groups"], args.rollout_batch_size, bound)
                    continue
                failures.check(group)
                all_groups.append(group)
                verdict = await hooks.judge(group)
                if verdict.keep:
                    groups.append(group)
                else:
                    await call_in_thread(worker.drop, rollout_id, group)
                    worker.release(1)
                    drops.add(group, verdict.reason)
    finally:
        # Also after an error: held groups would occupy the slots of the worker for ever. With the bound 0 they do so
        # until the next rollout: all that is begun before its weights serve would be too old.
        if args.max_weight_staleness != 0:
            worker.release()
    groups.sort(key=first_index)
    log_sample(next(iter_samples(groups)), f"rollout {rollout_id}, first sample")
    await hooks.finish(groups, all_groups, data_buffer)
    metrics |= {"rollout/waiting_groups": worker.queue_size()}
    if failures.num_failed:
        metrics["rollout/failed_samples"] = failures.num_failed
    return RolloutFnTrainOutput(samples=groups, metrics=metrics | drops.metrics())


def _lag(rollout_id: int, group: SampleGroup) -> int:
    """Age of the oldest weights that wrote into a group, in rollouts. 0 if they are unknown."""
    # An engine that never received weights reports text instead of a number.
    versions = [int(v) for sample in iter_samples(group) for v in sample.weight_versions if str(v).isdecimal()]
    return rollout_id - min(versions, default=rollout_id)


def _check_not_hopeless(rollout_id: int, num_stale: int, target: int, bound: int) -> None:
    if num_stale > _MAX_STALE_PER_TARGET * target:
        raise DataError(
            f"rollout {rollout_id}: {num_stale} groups in a row lag more than --max-weight-staleness "
            f"{bound} rollouts behind: engine weights are older than that. The bound must be at "
            "least --update-weights-interval minus 1."
        )


def generate_rollout_fully_async(
    args: Namespace, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The next batch of a worker that generates continuously.

    Raises:
        ConfigError: asked to evaluate.
    """
    if evaluation:
        raise ConfigError(
            "the fully-async rollout function cannot evaluate: "
            "set --eval-function-path slime.rollout.sglang_rollout.generate_rollout"
        )
    init_http_client(complete_args(args))
    return run(_generate_rollout_async(args, rollout_id, data_buffer))


generate_rollout_fully_async.keeps_prompts = True  # type: ignore[attr-defined]  # they outlive the rollout
