"""The worker that never stops: its bounds, what goes back to the data source, and how it ends."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter

import pytest

from slime.data.sample import Sample, iter_samples
from slime.rollout import collect, fully_async_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import AsyncRolloutWorker, generate_rollout_fully_async
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.errors import ConfigError, DataError, EngineError
from tests.unit.rollout.fake_engine import completion, make_args


class Locked:
    """A data source that two threads may use, as the Data Buffer actor is."""

    def __init__(self, args) -> None:
        self.source, self.lock, self.drawn = RolloutDataSourceWithBuffer(args), threading.Lock(), []

    def get_samples(self, count):
        with self.lock:
            groups = self.source.get_samples(count)
            self.drawn += [group[0].group_index for group in groups]
            return groups

    def add_samples(self, groups):
        with self.lock:
            self.source.add_samples(groups)


@pytest.fixture(autouse=True)
def _no_worker_stays():
    yield
    fully_async_rollout._stop_global_worker()


@pytest.fixture
def setup(engine, tiny_task):
    def make(on_generate=None, **values):
        defaults = {"prompt_data": tiny_task.train, "apply_chat_template": True, "sglang_server_concurrency": 8}
        args = make_args(tiny_task.model, engine(on_generate).port, **(defaults | values))
        return args, Locked(args)

    return make


def test_every_rollout_takes_full_groups_that_it_alone_gets_and_the_worker_goes_on(setup):
    args, source = setup()
    batches = [generate_rollout_fully_async(args, rollout_id, source).samples for rollout_id in range(3)]
    numbers = [group[0].group_index for batch in batches for group in batch]
    assert len(numbers) == len(set(numbers)) == 6
    assert all(sample.reward is not None for sample in iter_samples(batches))
    assert fully_async_rollout._global_worker.running


def test_no_more_groups_are_begun_than_the_staleness_bound_allows(setup):
    args, source = setup(max_weight_staleness=1)
    worker = AsyncRolloutWorker(args, source, concurrency=100)
    worker.start()
    wait_until(lambda: worker.queue_size() == 4, Deadline(600, "four groups"))  # (1 + 1) batches of two
    assert len(source.drawn) == 4
    worker.get_completed_groups(1)
    wait_until(lambda: worker.queue_size() == 4, Deadline(600, "the place to be taken again"))
    worker.stop()
    assert len(source.drawn) == 5
    assert not worker.worker_thread.is_alive()


def test_what_the_batch_of_this_rollout_has_already_counts_as_under_way(setup):
    args, source = setup(max_weight_staleness=1)
    worker = AsyncRolloutWorker(args, source, concurrency=100)
    worker.start()
    wait_until(lambda: worker.queue_size() == 4, Deadline(600, "four groups"))  # (1 + 1) batches of two
    assert len(worker.get_completed_groups(3, is_held=True)) == 3
    worker.release(1)  # a filter dropped it
    wait_until(lambda: worker.queue_size() == 2, Deadline(600, "its place to be taken again"))
    assert worker._num_free() == 0
    worker.release()  # the batch is complete
    wait_until(lambda: worker.queue_size() == 4, Deadline(600, "the places of the batch to be taken again"))
    worker.stop()
    assert len(source.drawn) == 7


def test_a_whole_run_has_never_begun_more_groups_than_its_batches_and_the_bound(setup):
    args, source = setup(max_weight_staleness=0)
    for rollout_id in range(4):
        groups = generate_rollout_fully_async(args, rollout_id, source).samples
        assert len(groups) == 2
        assert len(source.drawn) <= 2 * (rollout_id + 2)  # complete batches, and the one that may be under way


def test_responses_begun_too_long_ago_are_thrown_away_and_their_prompts_drawn_again(setup):
    asked, lock, are_answered = Counter(), threading.Lock(), threading.Event()

    def with_versions(payload, number):
        prompt = tuple(payload["input_ids"])
        with lock:
            asked[prompt] += 1
            first = list(asked)[:2]
            is_old = prompt in first and asked[prompt] <= 2  # both samples of the first two groups
            if len(first) == 2 and min(asked[one] for one in first) >= 2:
                are_answered.set()
        if not is_old:  # a batch must not be full before the old groups are seen
            are_answered.wait(600)
        reply = completion(payload, [5])
        reply["meta_info"]["weight_version"] = "3" if is_old else "6"
        return 200, reply

    args, source = setup(with_versions, max_weight_staleness=2, sglang_server_concurrency=4)
    output = generate_rollout_fully_async(args, 6, source)
    assert (output.metrics["rollout/stale_groups"], output.metrics["rollout/stale_tokens"]) == (2, 4)
    assert {version for sample in iter_samples(output.samples) for version in sample.weight_versions} == {"6"}
    again = len(source.drawn) - len(set(source.drawn)) + source.source.get_buffer_length()
    assert again >= 2


def test_a_response_continued_from_weights_that_are_too_old_is_begun_anew(setup):
    args, source = setup(max_weight_staleness=2, n_samples_per_prompt=1, rollout_batch_size=1)
    (group,) = source.get_samples(1)
    old = group[0]
    old.tokens = [1]
    old.append_response_tokens(tokens=[7], log_probs=[-1.0], text="7", meta_info={})
    old.weight_versions, old.status = ["0"], Sample.Status.ABORTED
    source.add_samples([group])
    numbers = {}
    for _ in range(6):  # other groups may be begun before it is drawn again
        for (sample,) in generate_rollout_fully_async(args, 3, source).samples:
            numbers[sample.group_index] = sample
    assert numbers[old.group_index].weight_versions == ["3"]
    assert numbers[old.group_index].response_length == 2  # the engine's two tokens, not the old one before them


def test_engines_that_can_never_be_fresh_enough_end_the_rollout_with_the_reason(setup):
    args, source = setup(max_weight_staleness=2)  # the engine stays at version 3
    with pytest.raises(DataError, match="--update-weights-interval"):
        generate_rollout_fully_async(args, 9, source)


def test_groups_that_a_weight_sync_aborts_go_back_with_their_tokens_and_are_continued_first(setup):
    def first_request_is_cut(payload, number):
        if number == 0:
            return 200, completion(payload, [8], "abort", text="8")
        return 200, completion(payload, [5])

    args, source = setup(first_request_is_cut, n_samples_per_prompt=1)
    seen = {}
    for rollout_id in range(4):
        for group in generate_rollout_fully_async(args, rollout_id, source).samples:
            seen[group[0].group_index] = group[0]
    (cut,) = [sample for sample in seen.values() if sample.tokens[-2:] == [8, 5]]
    assert cut.status is Sample.Status.COMPLETED
    assert len(cut.weight_versions) == 2
    assert source.drawn.count(cut.group_index) == 2


def test_groups_go_on_while_one_is_given_back_to_a_slow_data_source(setup):
    def first_request_is_cut(payload, number):
        return 200, completion(payload, [5], "abort" if number == 0 else "stop")

    args, source = setup(first_request_is_cut, n_samples_per_prompt=1)
    worker = AsyncRolloutWorker(args, source, concurrency=3)

    def add_samples(groups):
        wait_until(lambda: worker.queue_size() >= 2, Deadline(600, "two groups to finish meanwhile"))

    source.add_samples = add_samples
    worker.start()
    worker.wait_completed(Deadline(600, "a group"))
    wait_until(lambda: worker.queue_size() >= 3, Deadline(600, "three groups"))
    worker.stop()
    assert worker._error is None


def test_failing_groups_are_drawn_again_and_a_broken_world_ends_the_rollout_with_its_cause(setup):
    args, source = setup(custom_generate_function_path=f"{__file__}:broken", max_sample_retries=0)
    with pytest.raises(EngineError, match="tool server is gone"):
        generate_rollout_fully_async(args, 0, source)
    again = len(source.drawn) - len(set(source.drawn)) + source.source.get_buffer_length()
    assert again >= 2


def broken(args, sample, sampling_params):
    raise EngineError("tool server is gone")


def test_more_failed_samples_than_allowed_end_the_rollout(setup):
    flags = {"custom_generate_function_path": f"{__file__}:unlucky", "max_sample_retries": 0}
    args, source = setup(**flags, max_failed_share=1.0)
    output = generate_rollout_fully_async(args, 0, source)
    assert output.metrics["rollout/failed_samples"] == 4
    fully_async_rollout._stop_global_worker()
    GenerateState.clear_instances()
    args, source = setup(**flags, max_failed_share=0.5)
    with pytest.raises(DataError, match=r"no luck.*--max-failed-share 0\.5 allows 2"):
        generate_rollout_fully_async(args, 0, source)


def unlucky(args, sample, sampling_params):
    raise LookupError("no luck")


def test_a_source_without_prompts_is_an_error_and_not_a_wait(setup):
    args, source = setup()
    source.get_samples = lambda count: []
    with pytest.raises(DataError, match="returned no prompts"):
        generate_rollout_fully_async(args, 0, source)


def test_the_dynamic_filter_is_applied_and_its_drops_are_counted(setup):
    args, source = setup(dynamic_sampling_filter_path=f"{__file__}:keep_odd_groups")
    output = generate_rollout_fully_async(args, 0, source)
    assert all(group[0].group_index % 2 == 1 for group in output.samples)


def keep_odd_groups(args, samples, **kwargs):
    return samples[0].group_index % 2 == 1


def test_it_refuses_to_evaluate_and_names_the_function_that_can(setup):
    args, source = setup()
    with pytest.raises(ConfigError, match="--eval-function-path"):
        generate_rollout_fully_async(args, 0, source, evaluation=True)


def drop_all(args, samples, **kwargs):
    return False


def test_a_filter_that_drops_everything_ends_the_rollout_and_the_data_buffer_is_told(setup):
    args, source = setup(
        dynamic_sampling_filter_path=f"{__file__}:drop_all", rollout_batch_size=1, n_samples_per_prompt=1
    )
    dropped = []
    source.drop = lambda rollout_id, groups: dropped.extend((rollout_id, group[0].group_index) for group in groups)
    with pytest.raises(DataError, match="dropped 101 groups for a batch of 1"):
        generate_rollout_fully_async(args, 5, source)
    assert len(set(dropped)) == len(dropped) == 101


def test_a_source_that_takes_nothing_back_ends_the_rollout_instead_of_losing_the_group(setup):
    def aborts(payload, number):
        return 200, completion(payload, [5], reason="abort")

    args, source = setup(aborts)

    def refuse(groups):
        raise RuntimeError("this source is read-only")

    source.add_samples = refuse
    with pytest.raises(RuntimeError, match="read-only"):
        generate_rollout_fully_async(args, 0, source)


def test_a_rollout_waits_as_long_as_its_function_may_take_with_all_attempts(setup):
    args, source = setup(
        rollout_request_timeout=100.0, rm_timeout=5.0, custom_generate_timeout=40.0, max_sample_retries=2
    )
    worker = AsyncRolloutWorker(args, source)
    assert worker.patience() == (110.0, "--rollout-request-timeout")
    args.rollout_request_timeout, args.rollout_timeout = None, 70.0
    assert worker.patience() == (70.0, "--rollout-timeout")
    args.custom_generate_function_path = f"{__file__}:broken"
    assert worker.patience() == (130.0, "--custom-generate-timeout")


def test_a_schedule_that_cannot_be_written_ends_the_rollout_instead_of_losing_the_group(setup, monkeypatch):
    def full(event, groups):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fully_async_rollout, "record", full)
    args, source = setup(
        lambda payload, number: (200, completion(payload, [5], "abort")), rollout_request_timeout=600.0
    )
    worker = AsyncRolloutWorker(args, source)
    worker.start()
    with pytest.raises(OSError, match="No space left"):
        worker.wait_completed(Deadline(60, "a group"))
    worker.stop()
    assert worker._active == set()


def fan_out(args, sample, sampling_params):
    """Two rows per execution, of the newest weights."""
    rows = [copy.deepcopy(sample) for _ in range(2)]
    for row in rows:
        row.tokens, row.loss_mask, row.response_length = [1], [], 0
        row.append_response_tokens(tokens=[7], log_probs=[-1.0], text="7", meta_info={})
        row.status, row.weight_versions, row.reward = Sample.Status.COMPLETED, ["5"], 1.0
    return rows


class Nested(Locked):
    """A source whose groups may hold the rows of an execution as one entry."""

    def get_samples(self, count):
        with self.lock:
            groups = self.source.get_samples(count)
            self.drawn += [next(iter_samples(group)).group_index for group in groups]
            return groups


def test_a_stale_group_with_the_rows_of_an_execution_is_generated_again_from_one_sample_per_entry(setup):
    path = f"{__file__}:fan_out"
    args, _ = setup(custom_generate_function_path=path, max_weight_staleness=2)
    source = Nested(args)
    # a sync aborted the second execution, and the first was complete, with two rows of old weights
    (group,) = source.get_samples(1)
    rows, other = fan_out(args, group[0], {}), group[1]
    for row in rows:
        row.weight_versions = ["0"]
    other.status = Sample.Status.ABORTED
    source.add_samples([[rows, other]])
    found = []
    for _ in range(4):
        found += generate_rollout_fully_async(args, 5, source).samples
    (again,) = [group for group in found if next(iter_samples(group)).group_index == 0]
    assert [len(entry) for entry in again] == [2, 2]
    assert {version for sample in iter_samples(again) for version in sample.weight_versions} == {"5"}


def gives_up(args, sample, sampling_params):
    sample.tokens = [1]
    sample.response, sample.response_length, sample.loss_mask, sample.rollout_log_probs = "", 0, None, None
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0], text="7", meta_info={})
    sample.reward, sample.remove_sample = 0.0, sample.index % 2 == 0
    sample.status = Sample.Status.ABORTED if sample.remove_sample else Sample.Status.COMPLETED
    return sample


def test_a_sample_that_its_function_aborted_without_a_part_in_the_loss_ends_its_group(setup):
    path, limits = f"{__file__}:gives_up", {"custom_generate_timeout": 3, "max_sample_retries": 0, "rm_timeout": 2}
    args, source = setup(custom_generate_function_path=path, **limits)
    samples = list(iter_samples(generate_rollout_fully_async(args, 0, source).samples))
    assert [sample.status.value for sample in samples] == ["aborted", "completed"] * 2


def test_a_left_over_group_keeps_the_rows_of_an_execution_as_one_entry(setup):
    rows = [Sample(index=0, group_index=0, status=Sample.Status.COMPLETED, reward=1.0) for _ in range(2)]
    other = Sample(index=1, group_index=0, status=Sample.Status.ABORTED)
    pool = [[rows, other], [Sample(index=2, group_index=1), Sample(index=3, group_index=1)]]
    tasks = []

    def fetch(count):
        return [pool.pop(0) for _ in range(min(2, len(pool)))]

    async def generated(group):
        await asyncio.sleep(1000 if isinstance(group[0], list) else 0)
        return group

    def submit(groups):
        new = [asyncio.create_task(generated(group)) for group in groups]
        tasks.extend(new)
        return new

    async def judge(group):
        return collect.DynamicFilterOutput(keep=True)

    async def stop():
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    plan = collect.BatchPlan(target=1, group_size=2, chunk=2, label="x", keeps_responses=True)
    found = asyncio.run(collect.collect(plan, fetch=fetch, submit=submit, judge=judge, stop=stop))
    assert [len(entry) if isinstance(entry, list) else 1 for entry in found.left_over[0]] == [2, 1]
    setup(n_samples_per_prompt=2)[1].add_samples(found.left_over)
