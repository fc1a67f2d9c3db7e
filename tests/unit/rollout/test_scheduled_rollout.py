"""A recorded schedule is executed: every part under its recorded weights, every group in its recorded batch."""

from __future__ import annotations

import json

import pytest

from slime.data.sample import Sample, iter_samples
from slime.data.schedule import SCHEDULE, Schedule, read_schedule, record
from slime.rollout import fully_async_rollout, scheduled_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.scheduled_rollout import generate_rollout
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.errors import ConfigError, DataError
from tests.unit.rollout.fake_engine import completion, make_args
from tests.unit.rollout.test_fully_async import Locked

LENGTH = 8


class Model:
    """Weights of one version: each token depends on the version, the seed and the position."""

    def __init__(self) -> None:
        self.version = 0
        self.aborts = False
        self.refuses = False
        self.seen = []

    def __call__(self, payload, number):
        self.seen.append(payload)
        params, begin = payload["sampling_params"], len(payload["input_ids"])
        count = params["max_new_tokens"]
        reason = "length"
        seed = params["sampling_seed"]
        if self.refuses and (count < LENGTH or (seed % 2 and sum(payload["input_ids"]) % 2)):
            return 400, "no"
        if self.aborts and count == LENGTH and seed % 2 == 0:
            count, reason = 3, "abort"
        ids = [1 + (7 * self.version + 3 * seed + begin + i) % 50 for i in range(count)]
        reply = completion(payload, ids, reason)
        reply["meta_info"]["weight_version"] = str(self.version)
        return 200, reply


async def last_token(args, sample, **kwargs):
    return float(sample.tokens[-1])


@pytest.fixture
def setup(engine, tiny_task, tmp_path):
    def make(**values):
        model = Model()
        defaults = {
            "prompt_data": tiny_task.train,
            "apply_chat_template": True,
            "deterministic_mode": True,
            "sglang_enable_deterministic_inference": True,
            "rollout_max_response_len": LENGTH,
            "custom_rm_path": f"{__name__}.last_token",
            "sglang_server_concurrency": 4,
            "replay_schedule": str(tmp_path / SCHEDULE),
        }
        make.engine = engine(model)
        return make_args(tiny_task.model, make.engine.port, **(defaults | values)), model

    yield make
    Schedule.current = None
    scheduled_rollout._replay = None
    fully_async_rollout._stop_global_worker()


def tokens_of(groups):
    return [(sample.index, sample.tokens, sample.reward, sample.weight_versions) for sample in iter_samples(groups)]


def test_a_run_that_never_stops_to_generate_is_made_again_in_another_order(setup, tmp_path):
    args, model = setup()
    model.aborts = True
    Schedule.current = Schedule(tmp_path / SCHEDULE)
    source, made = Locked(args), []
    for model.version in range(4):
        made.append(generate_rollout_fully_async(args, model.version, source).samples)
        Schedule.current.batch(model.version, list(iter_samples(made[-1])))
    fully_async_rollout._stop_global_worker()
    Schedule.current = None
    assert {3, LENGTH} <= {
        end for rows in read_schedule(tmp_path / SCHEDULE).values() for row in rows for _, end in row.parts
    }
    assert '"aborted"' in (tmp_path / SCHEDULE).read_text()
    GenerateState.clear_instances()
    model.aborts, source = False, RolloutDataSourceWithBuffer(args)
    for model.version in range(4):
        again = generate_rollout(args, model.version, source).samples
        assert tokens_of(again) == tokens_of(made[model.version])


def test_a_sample_that_failed_fails_again_and_keeps_the_tokens_that_it_had(setup, tmp_path):
    args, model = setup(max_failed_share=1.0)
    model.aborts = model.refuses = True
    Schedule.current = Schedule(tmp_path / SCHEDULE)
    source, made = Locked(args), []
    for model.version in range(3):
        made.append(generate_rollout_fully_async(args, model.version, source).samples)
        Schedule.current.batch(model.version, list(iter_samples(made[-1])))
    fully_async_rollout._stop_global_worker()
    Schedule.current = None
    failed = [sample for sample in iter_samples(made) if sample.status is Sample.Status.FAILED]
    assert {1, 3} <= {sample.response_length for sample in failed}  # without a token, and with those before the failure
    GenerateState.clear_instances()
    model.aborts, model.refuses, source = False, False, RolloutDataSourceWithBuffer(args)
    for model.version in range(3):
        again = generate_rollout(args, model.version, source).samples
        assert tokens_of(again) == tokens_of(made[model.version])
        for one, other in zip(iter_samples(again), iter_samples(made[model.version]), strict=True):
            assert (one.status, one.remove_sample) == (other.status, other.remove_sample)


def write(tmp_path, batches):
    lines = [{"batch": rollout, "samples": rows} for rollout, rows in batches.items()]
    (tmp_path / SCHEDULE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_part_has_its_recorded_weights_and_length_and_the_last_ends_by_itself(setup, tmp_path):
    # group 1 was begun by version 0, aborted twice, and trained in rollout 1; group 0 was dropped
    cut = [[0, 3], [1, 3], [1, LENGTH]]
    whole = [[0, LENGTH]]
    write(tmp_path, {0: [[2, 4, 0, whole], [2, 5, 0, whole]], 1: [[1, 2, 0, cut], [1, 3, 0, whole]]})
    args, model = setup(rollout_batch_size=1)
    source = RolloutDataSourceWithBuffer(args)
    first = generate_rollout(args, 0, source).samples
    model.version = 1
    second = generate_rollout(args, 1, source).samples
    assert [sample.index for sample in iter_samples([first, second])] == [4, 5, 2, 3]
    parts, other = second[0]
    assert parts.weight_versions == ["0", "1", "1"]
    assert other.weight_versions == ["0"]
    begin = len(parts.tokens) - LENGTH
    seeds = [args.rollout_seed + position for position in range(2)]
    expected = [1 + (7 * (i >= 3) + 3 * seeds[0] + begin + i) % 50 for i in range(LENGTH)]
    assert parts.tokens[begin:] == expected
    assert parts.status is Sample.Status.TRUNCATED
    assert parts.reward == expected[-1]


def begun_by_version_0(setup, tmp_path):
    """``(args, model, samples)``: version 0 generated three tokens of the first sample of rollout 1, and the other."""
    cut, whole = [[0, 3], [1, LENGTH]], [[0, LENGTH]]
    write(tmp_path, {0: [[0, 0, 0, whole], [0, 1, 0, whole]], 1: [[1, 2, 0, cut], [1, 3, 0, whole]]})
    args, model = setup(rollout_batch_size=1)
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    model.version = 1
    recorded = generate_rollout(args, 1, source).samples
    scheduled_rollout._replay = None
    return args, model, recorded


def test_a_branch_continues_samples_that_earlier_weights_began(setup, tmp_path):
    args, model, recorded = begun_by_version_0(setup, tmp_path)
    with (tmp_path / SCHEDULE).open("a") as file:
        for sample in iter_samples(recorded):
            file.write(json.dumps({"begun": sample.to_dict()}) + "\n")
    asked = len(model.seen)
    again = generate_rollout(args, 1, RolloutDataSourceWithBuffer(args)).samples
    assert tokens_of(again) == tokens_of(recorded)
    (request,) = model.seen[asked:]
    assert request["sampling_params"]["max_new_tokens"] == LENGTH - 3


def test_a_sample_that_was_aborted_with_its_last_token_is_rewarded_in_a_branch(setup, tmp_path):
    args, _, recorded = begun_by_version_0(setup, tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    _, second = source.get_samples(2)
    for sample, known, count in zip(second, iter_samples(recorded), (3, LENGTH), strict=True):
        tokens = known.tokens[: len(known.tokens) - LENGTH + count]
        sample.tokens, sample.response_length, sample.status = tokens, count, Sample.Status.ABORTED
        sample.loss_mask, sample.rollout_log_probs = [1] * count, known.rollout_log_probs[:count]
        sample.weight_versions = ["0"]
    source.add_samples([second])
    again = generate_rollout(args, 1, source).samples
    assert tokens_of(again) == tokens_of(recorded)


def test_a_part_that_an_engine_aborts_is_continued_and_groups_in_no_batch_do_not_stay_in_the_data_buffer(
    setup, tmp_path
):
    cut, whole = [[0, 5], [1, LENGTH]], [[0, LENGTH]]
    write(tmp_path, {0: [[2, 4, 0, whole], [2, 5, 0, whole]], 1: [[3, 6, 0, cut], [3, 7, 0, cut]]})
    args, model = setup(rollout_batch_size=1)
    source = RolloutDataSourceWithBuffer(args)
    dropped = []
    source.drop = lambda rollout_id, groups: dropped.extend(group[0].group_index for group in groups)
    left = []

    def leaves(payload, number):
        status, reply = model(payload, number)
        if payload["sampling_params"]["max_new_tokens"] == 5 and not left:
            left.append(payload)
            payload["sampling_params"]["max_new_tokens"] = 2
            reply = model(payload, number)[1]
            reply["meta_info"]["finish_reason"] = {"type": "abort"}
        return status, reply

    setup.engine.on_generate = leaves
    generate_rollout(args, 0, source)
    model.version = 1
    samples = list(iter_samples(generate_rollout(args, 1, source).samples))
    assert left
    assert dropped == [0, 1]
    for position, sample in enumerate(samples):
        begin = len(sample.tokens) - LENGTH
        seed = args.rollout_seed + position
        assert sample.tokens[begin:] == [1 + (7 * (i >= 5) + 3 * seed + begin + i) % 50 for i in range(LENGTH)]


async def own_function(args, sample, sampling_params):
    sample.response, sample.tokens, sample.response_length = "7", [1, 7], 1
    sample.weight_versions = ["0"]
    return sample


def test_a_custom_function_is_not_called_for_a_sample_that_failed(setup, tmp_path):
    write(tmp_path, {0: [[0, 0, 0, [[0, 1]]], [0, 1, 0, [[None, 1]], "generate"]]})
    args, _ = setup(rollout_batch_size=1, custom_generate_function_path=f"{__name__}.own_function")
    made = list(iter_samples(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples))
    assert [(sample.status.value, sample.reward) for sample in made] == [("completed", 7.0), ("failed", 0.0)]


def test_a_schedule_of_many_rollouts_is_not_read_again_for_each(setup, tmp_path, monkeypatch):
    batches = {number: [[number, 2 * number + i, 0, [[number, LENGTH]]] for i in range(2)] for number in range(20)}
    write(tmp_path, batches)
    args, model = setup(rollout_batch_size=1)
    seen = []
    real = scheduled_rollout._versions
    monkeypatch.setattr(scheduled_rollout, "_versions", lambda rows: (seen.append(len(rows)), real(rows))[1])
    source = RolloutDataSourceWithBuffer(args)
    for model.version in range(20):
        generate_rollout(args, model.version, source)
    assert len(seen) <= 6 * 20


def test_the_record_of_a_replay_is_the_record(setup, tmp_path):
    rows = {0: [[0, 0, 0, [[0, LENGTH]]], [0, 1, 0, [[0, 0], [0, 2], [0, LENGTH]]]]}
    write(tmp_path, rows)
    args, _ = setup(rollout_batch_size=1)
    Schedule.current = Schedule(tmp_path / "again.jsonl")
    groups = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    record("aborted", [])
    Schedule.current.batch(0, list(iter_samples(groups)))
    (before,), (after,) = (read_schedule(tmp_path / name).values() for name in (SCHEDULE, "again.jsonl"))
    assert [row.parts for row in before] == [row.parts for row in after]
    assert len({row.crc for row in after}) == 2


@pytest.mark.parametrize(
    ("rollout_id", "batches", "message"),
    [
        (0, {1: [[0, 0, 0, [[1, 8]]]]}, "has no rollout 0, its rollouts are 1 to 1"),
        (1, {1: [[0, 0, 0, [[0, 8]]], [0, 1, 0, [[0, 8]]]]}, "before version 1 generated 8 tokens of sample 0, and no"),
        (0, {0: [[0, 0, 0, [[0, 8]]]]}, "1 samples of group 0, and --n-samples-per-prompt is 2"),
        (
            0,
            {0: [[0, 0, 0, [[1, 8]]], [0, 1, 0, [[1, 8]]]]},
            "weight version 1 generated a part of group 0, which is in rollout 0",
        ),
        (0, {0: [[0, 0, 0, [[0, 8]]], [0, 1, 0, [[0, 8]]]]}, "no longer returns group 0"),
        (0, {0: [[None, 0, 0, [[0, 8]]]]}, "has samples without a group"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_an_error_that_names_the_place(
    setup, tmp_path, rollout_id, batches, message
):
    args, _ = setup(rollout_batch_size=1)
    write(tmp_path, batches)
    source = RolloutDataSourceWithBuffer(args)
    if "no longer" in message:
        source.get_samples(1)
    with pytest.raises(DataError, match=message):
        generate_rollout(args, rollout_id, source)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replay_schedule": None}, "--replay-schedule FILE"),
        ({"update_weights_interval": 2}, "--update-weights-interval 2 does not work"),
    ],
)
def test_a_scheduled_rollout_needs_its_schedule_and_all_weights(setup, values, message):
    args, _ = setup(**values)
    with pytest.raises(ConfigError, match=message):
        generate_rollout(args, 0, None)
