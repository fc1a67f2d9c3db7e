"""From samples to columns: rewards by group, masks, ids, optional columns, hooks, errors."""

from __future__ import annotations

import math
import random
import statistics
from argparse import Namespace
from typing import Any

import pytest

from slime.batch.compile import compile_train_data, fill_rollout_ids, rollout_mask_sums
from slime.batch.rewards import RewardArgs, SignalWatch, group_keys, normalize_by_group
from slime.config.resolve.cluster import is_group_relative
from slime.data.columns import COLUMNS
from slime.data.sample import Sample
from slime.utils.errors import DataError

RAW = RewardArgs(rewards_normalization=False)
GRPO = RewardArgs(n_samples_per_prompt=2)


def make_sample(index: int = 0, *, group: int | None = 0, reward=1.0, response: int = 2, **kwargs) -> Sample:
    return Sample(
        group_index=group,
        index=index,
        tokens=[7, 8, *range(response)],
        response_length=response,
        reward=reward,
        status=Sample.Status.COMPLETED,
        **kwargs,
    )


def test_groups_are_normalised_one_by_one_whatever_their_size_and_order():
    samples = [
        make_sample(0, group=5, reward=1.0),
        make_sample(1, group=9, reward=10.0),
        make_sample(2, group=5, reward=3.0),
        make_sample(3, group=9, reward=20.0),
        make_sample(4, group=9, reward=60.0),
    ]
    data = compile_train_data([samples[:2], samples[2:]], rewards=GRPO)
    five, nine = [1.0, 3.0], [10.0, 20.0, 60.0]

    def expected(value: float, group: list[float]) -> float:
        return (value - sum(group) / len(group)) / (statistics.stdev(group) + 1e-6)

    wanted = [expected(1, five), expected(10, nine), expected(3, five), expected(20, nine), expected(60, nine)]
    assert data["rewards"] == pytest.approx(wanted)
    assert data["raw_reward"] == [1.0, 10.0, 3.0, 20.0, 60.0]


@pytest.mark.parametrize("seed", range(10))
def test_normalised_groups_have_mean_zero_and_deviation_one(seed):
    rng = random.Random(seed)
    rewards = [rng.uniform(-5, 5) for _ in range(12)]
    keys = [rng.randrange(3) for _ in rewards]
    out = normalize_by_group(rewards, keys, divide_by_std=True)
    for key in set(keys):
        values = [v for v, k in zip(out, keys, strict=True) if k == key]
        assert math.fsum(values) == pytest.approx(0, abs=1e-6)
        if len(values) > 1:
            assert statistics.stdev(values) == pytest.approx(1, abs=1e-4)


def test_a_group_of_one_and_a_group_of_equal_rewards_teach_nothing():
    assert normalize_by_group([5.0, 0.1, 0.1, 0.1], [0, 1, 1, 1], divide_by_std=True) == [0.0] * 4
    assert normalize_by_group([5.0, 0.7, 0.7], [0, 1, 1], divide_by_std=False) == [0.0] * 3


def test_without_std_normalisation_only_the_mean_is_subtracted():
    settings = RewardArgs(grpo_std_normalization=False, n_samples_per_prompt=2)
    data = compile_train_data([make_sample(0, reward=1), make_sample(1, reward=4)], rewards=settings)
    assert data["rewards"] == [-1.5, 1.5]


def test_rewards_stay_as_they_are_without_normalisation():
    data = compile_train_data([make_sample(0, reward=1), make_sample(1, reward=4)], rewards=RAW)
    assert data["rewards"] == data["raw_reward"] == [1.0, 4.0]


def test_samples_without_group_index_are_grouped_in_blocks():
    assert group_keys([make_sample(i, group=None) for i in range(4)], 2) == [0, 0, 1, 1]
    with pytest.raises(DataError, match=r"3 samples without group_index .* --n-samples-per-prompt 2"):
        group_keys([make_sample(i, group=None) for i in range(3)], 2)
    with pytest.raises(DataError, match="1 of 2 samples have no group_index"):
        group_keys([make_sample(0), make_sample(1, group=None)], 2)


@pytest.mark.parametrize(
    ("reward", "key", "message"),
    [
        (None, None, "sample 3 .group 1.: reward is of type NoneType"),
        ({"a": 1}, None, "--reward-key"),
        ({"a": 1}, "b", "keys .'a'.*--reward-key b"),
        (1.0, "b", "--reward-key b"),
        (math.nan, None, "finite"),
        ("good", None, "'good'"),
    ],
)
def test_a_reward_that_is_no_finite_number_names_the_sample(reward, key, message):
    sample = make_sample(3, group=1, reward=reward)
    with pytest.raises(DataError, match=message):
        compile_train_data([sample], rewards=RewardArgs(reward_key=key))


def test_reward_key_selects_from_a_dict_and_metadata_raw_reward_replaces_what_is_logged():
    samples = [
        make_sample(0, reward={"acc": 1.0, "len": 9}, metadata={"raw_reward": 0.25}),
        make_sample(1, reward={"acc": 3.0, "len": 9}),
    ]
    data = compile_train_data(samples, rewards=RewardArgs(reward_key="acc", n_samples_per_prompt=2))
    assert data["raw_reward"] == [0.25, 3.0]
    assert data["rewards"] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)


def test_a_raw_reward_of_the_data_set_that_is_no_number_names_the_sample():
    samples = [make_sample(0, metadata={"raw_reward": None}), make_sample(1, reward=2.0, metadata={"raw_reward": "3"})]
    assert compile_train_data(samples, rewards=RAW)["raw_reward"] == [samples[0].reward, 3.0]
    for metadata in (None, {"raw_reward": {"acc": 0.5}}):
        assert compile_train_data([make_sample(0, reward=2.0, metadata=metadata)], rewards=RAW)["raw_reward"] == [2.0]
    for value in ("good", [1.0]):
        sample = make_sample(7, metadata={"raw_reward": value})
        with pytest.raises(DataError, match=r"sample 7 .* raw_reward .*must be a number"):
            compile_train_data([sample], rewards=RAW)


def test_every_required_column_is_there_and_nested_groups_are_flattened_in_order():
    a, b, c = (make_sample(i, response=i + 1) for i in range(3))
    data = compile_train_data([[a, [b]], [c]], rewards=RAW)
    assert {c.name for c in COLUMNS.values() if c.required and c.per != "rank"} == set(data)
    assert data["sample_indices"] == [0, 1, 2]
    assert data["response_lengths"] == [1, 2, 3]
    assert data["total_lengths"] == [3, 4, 5]


def test_removed_samples_are_masked_but_count_in_their_group():
    removed = make_sample(0, reward=0.0, remove_sample=True, loss_mask=[1, 1])
    kept = make_sample(1, reward=2.0)
    data = compile_train_data([removed, kept], rewards=RewardArgs(grpo_std_normalization=False))
    assert [mask.tolist() for mask in data["loss_masks"]] == [[0, 0], [1, 1]]
    assert data["rewards"] == [-1.0, 1.0]
    assert removed.loss_mask == [1, 1]  # samples are not changed


def test_samples_that_failed_do_not_count_in_their_group():
    failed = make_sample(0, reward=0.0, remove_sample=True)
    failed.status = Sample.Status.FAILED
    others = [make_sample(1, reward=2.0), make_sample(2, reward=4.0)]
    data = compile_train_data([failed, *others], rewards=RewardArgs(grpo_std_normalization=False))
    assert data["rewards"] == [0.0, -1.0, 1.0]
    assert data["raw_reward"] == [0.0, 2.0, 4.0]


def test_rollout_ids_are_filled_with_unused_numbers():
    assert fill_rollout_ids([None, 1, None, 0, None]) == [2, 1, 3, 0, 4]
    assert fill_rollout_ids([None, None]) == [0, 1]


def test_mask_sums_add_up_over_the_samples_of_a_rollout():
    assert rollout_mask_sums([4, 7, 4], [[1, 0], [1], [1, 1]]) == [3, 1, 3]


def test_log_probs_missing_in_some_samples_are_an_error_that_names_the_sample():
    samples = [make_sample(0, rollout_log_probs=[-1.0, -2.0]), make_sample(1)]
    with pytest.raises(DataError, match=r"sample 1 .*no rollout_log_probs.*every sample must carry them"):
        compile_train_data(samples, rewards=RAW)


def test_log_probs_missing_in_the_first_sample_are_not_dropped_silently():
    samples = [make_sample(0), make_sample(1, rollout_log_probs=[-1.0, -2.0])]
    with pytest.raises(DataError, match="sample 0"):
        compile_train_data(samples, rewards=RAW)


def test_log_probs_are_made_up_only_where_nothing_is_trained():
    samples = [
        make_sample(0, rollout_log_probs=[-1.0, -2.0]),
        make_sample(1, remove_sample=True),
        make_sample(2, response=0),
    ]
    data = compile_train_data(samples, rewards=RAW)
    assert data["rollout_log_probs"] == [[-1.0, -2.0], [0.0, 0.0], []]


def test_no_log_probs_at_all_means_no_column():
    assert "rollout_log_probs" not in compile_train_data([make_sample()], rewards=RAW)


def test_weight_versions_train_metadata_and_sources_travel_with_the_samples():
    samples = [
        make_sample(0, weight_versions=["3"], train_metadata={"x": 1}, metadata={"source_name": "gsm"}),
        make_sample(1, metadata={"round_number": 2}),
    ]
    data = compile_train_data(samples, rewards=RAW)
    assert data["weight_versions"] == [["3"], []]
    assert data["metadata"] == [{"x": 1}, None]
    assert data["source_names"] == ["gsm", "unknown"]
    assert data["round_number"] == [None, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [1]}, "loss mask of 1 for a response of 2"),
        ({"loss_mask": [1, 0.5]}, "loss mask with 0.5"),
        ({"rollout_log_probs": [-1.0]}, "1 rollout_log_probs for a response of 2"),
    ],
)
def test_lengths_and_masks_that_do_not_fit_are_errors(change, message):
    with pytest.raises(DataError, match=message):
        compile_train_data([make_sample(0, **change)], rewards=RAW)


def test_a_sample_without_a_prompt_and_a_rollout_without_samples_are_errors():
    sample = make_sample()
    sample.tokens = [1, 2]
    with pytest.raises(DataError, match="at least one prompt token"):
        compile_train_data([sample], rewards=RAW)
    with pytest.raises(DataError, match="no samples"):
        compile_train_data([[]], rewards=RAW)


def test_truncated_samples_are_flagged():
    sample = make_sample()
    sample.status = Sample.Status.TRUNCATED
    assert compile_train_data([sample, make_sample(1)], rewards=RAW)["truncated"] == [1, 0]


def test_post_process_hook_replaces_the_rewards():
    args = object()

    def hook(given, samples):
        assert given is args
        return [9.0] * len(samples), [float(s.index) for s in samples]

    data = compile_train_data([[make_sample(0), make_sample(1)]], rewards=GRPO, post_process=hook, args=args)
    assert (data["raw_reward"], data["rewards"]) == ([9.0, 9.0], [0.0, 1.0])
    with pytest.raises(DataError, match="--custom-reward-post-process-path returned 0 raw"):
        compile_train_data([make_sample()], rewards=GRPO, post_process=lambda a, s: ([], [1.0]))


def minimal(args, samples):
    n = len(samples)
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [0.0] * n,
        "raw_reward": [0.0] * n,
        "truncated": [0] * n,
        "sample_indices": list(range(n)),
        "loss_masks": [[1, 0]] * n,
    }


def test_a_converter_with_the_documented_minimum_is_completed():
    data = compile_train_data([make_sample(0), make_sample(1)], rewards=GRPO, convert=minimal)
    assert data["rollout_ids"] == [0, 1]
    assert data["rollout_mask_sums"] == [1, 1]
    assert data["total_lengths"] == [4, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("rewards"), "lacks the columns rewards"),
        (lambda d: d.update(rewards=[1.0]), "1 entries in column rewards for 2"),
        (lambda d: d.pop("tokens"), "at least the columns tokens"),
    ],
)
def test_a_converter_that_leaves_something_out_is_told_what(change, message):
    def broken(args, samples):
        data = minimal(args, samples)
        change(data)
        return data

    with pytest.raises(DataError, match=message):
        compile_train_data([make_sample(0), make_sample(1)], rewards=GRPO, convert=broken)


@pytest.mark.parametrize(("ids", "fits"), [((3, 3), True), ((None, None), False), ((3, 4), False), ((3, None), False)])
def test_rows_of_one_execution_must_say_that_they_belong_together(ids, fits):
    rows = [Sample(index=1, group_index=0, tokens=[1, 2], response_length=1, reward=1.0, rollout_id=i) for i in ids]
    single = Sample(index=0, group_index=0, tokens=[1, 2], response_length=1, reward=0.0, rollout_id=0)
    if fits:
        assert compile_train_data([[single, rows]], rewards=RewardArgs())["rollout_mask_sums"] == [1, 2, 2]
        return
    with pytest.raises(DataError, match="rows that one execution made of sample 1"):
        compile_train_data([[single, rows]], rewards=RewardArgs())


def test_three_rollouts_without_a_difference_between_rewards_are_reported(caplog):
    learns: dict[str, Any] = {"advantage_estimator": "grpo", "rewards_normalization": True, "loss_type": "policy_loss"}
    replaced = ("custom_advantage_function_path", "custom_reward_post_process_path")
    learns |= {"compute_advantages_and_returns": True, "use_opd": False, **dict.fromkeys(replaced)}
    learns["custom_convert_samples_to_train_data_path"] = None
    watch = SignalWatch(is_group_relative(Namespace(**learns)))
    flat, useful = ([0.0, 0.0], [1.0, 1.0]), ([0.7, -0.7], [1.0, 0.0])
    for number, rewards in enumerate([flat, flat, useful, flat, flat]):
        watch.check(number, *rewards)
    assert not caplog.text
    watch.check(5, *flat)
    assert "rollout 5: nothing is learned: for 3 rollouts" in caplog.text
    assert "between 1 and 1" in caplog.text
    caplog.clear()
    for other in ({"loss_type": "sft_loss"}, {"use_opd": True}, {"compute_advantages_and_returns": False}):
        watch = SignalWatch(is_group_relative(Namespace(**learns | other)))
        for number in range(3):
            watch.check(number, *flat)
    assert not caplog.text
