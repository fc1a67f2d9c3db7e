"""The rule for rewards, applied to reward functions, generate functions, services and batches."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs, raw_rewards
from slime.data.sample import Sample
from slime.data.values import reward_number
from slime.rollout.base_types import complete_args
from slime.rollout.failures import is_given_up
from slime.rollout.rm_hub import score
from slime.utils.errors import DataError

HUGE = 10**5000

BAD_NUMBERS = [
    (1e308, r"reward is 1e\+308; a reward is at most 1e\+16 in magnitude"),
    (-3e38, r"reward is -3e\+38; a reward is at most"),
    pytest.param(HUGE, "reward is an integer of 16610 bits; a reward is at most", id="huge"),
    (math.nan, "reward is nan; a reward is a finite number"),
    (np.float32("inf"), "reward is inf; a reward is a finite number"),
    ("1", "reward is the text '1'; a reward is a number"),
    (None, "reward is of type NoneType"),
    ([1.0], "reward is of type list"),
]
BAD_DICTS = [
    ({"score": "1"}, r"reward\['score'\] is the text '1'"),
    ({"score": HUGE}, r"reward\['score'\] is an integer of 16610 bits"),
    (
        {"score": 1.0, "parts": [{"a": math.nan}]},
        r"reward\['parts'\]\[0\]\['a'\] is nan; a number in a reward is finite",
    ),
    ({"score": 1.0, "steps": (1, 1e39)}, r"reward\['steps'\]\[1\] is 1e\+39; a number in a reward is finite and fits"),
    ({"score": 1.0, "loss": torch.tensor(math.inf)}, r"reward\['loss'\] is inf"),
    ({"acc": 1.0}, r"a dict with the keys acc, and --reward-key reads 'score'"),
]
GOOD = [True, 0, 1e16, -2.5, np.float32(0.25), np.int64(3), np.bool_(True), torch.tensor(2.0), np.array(1.5)]


def returns(args: Any, sample: Sample) -> Any:
    return args.returned


def scored(returned: Any, reward_key: str | None = None, own: bool = False) -> Sample:
    sample = Sample(index=7, tokens=[1, 2], response_length=1, reward=returned if own else None)
    args = SimpleNamespace(custom_rm_path=f"{__file__}:returns", returned=returned, reward_key=reward_key)
    asyncio.run(score(complete_args(args), sample))  # type: ignore[arg-type]
    return sample


@pytest.mark.parametrize(("value", "message"), BAD_NUMBERS[:-2])
@pytest.mark.parametrize("own", [False, True], ids=["reward function", "generate function"])
def test_a_number_that_breaks_the_rule_is_a_failed_sample_with_its_address(value: Any, message: str, own: bool):
    sample = scored(value, own=own)
    assert is_given_up(sample)
    assert sample.reward == 0.0
    failure = sample.metadata["failure"]
    assert (failure["boundary"], failure["type"]) == ("reward", "ScoringError")
    assert_matches(message, failure["message"])
    assert "sample 7" in failure["message"]


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


@pytest.mark.parametrize(("value", "message"), BAD_DICTS)
@pytest.mark.parametrize("own", [False, True], ids=["reward function", "generate function"])
def test_an_entry_that_breaks_the_rule_is_named_by_its_path(value: Any, message: str, own: bool):
    sample = scored(value, reward_key="score", own=own)
    assert is_given_up(sample)
    assert sample.reward == {"score": 0.0}
    assert_matches(message, sample.metadata["failure"]["message"])


@pytest.mark.parametrize("value", GOOD)
def test_numbers_and_scalars_of_numpy_and_torch_are_plain_numbers_afterwards(value: Any):
    for reward in (scored(value).reward, scored({"score": value, "pred": "42"}, "score").reward["score"]):
        assert type(reward) in (bool, int, float)
        assert reward == value


def test_what_is_not_read_may_be_text():
    reward = {"score": 1.0, "acc": True, "pred": "42", "why": None, "history": np.ones(3)}
    assert scored(reward, "score").reward.keys() == reward.keys()


@pytest.mark.parametrize(("value", "message"), BAD_NUMBERS)
def test_a_batch_refuses_the_same_numbers(value: Any, message: str):
    with pytest.raises(DataError, match=r"sample 7 \(group 1\): " + message):
        raw_rewards([Sample(index=7, group_index=1, reward=value)], RewardArgs())
    with pytest.raises(ValueError, match=message):
        reward_number(value)


def test_a_batch_refuses_them_from_a_post_process_function_as_well():
    sample = Sample(
        index=7, group_index=1, reward=1.0, tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED
    )
    with pytest.raises(DataError, match=r"--custom-reward-post-process-path returned .* processed reward 0 is 1e\+308"):
        compile_train_data([sample], rewards=RewardArgs(), post_process=lambda args, samples: ([1.0], [1e308]))


def test_a_reward_that_contains_itself_is_a_failed_sample():
    endless: dict[str, Any] = {"score": 1.0}
    endless["parts"] = [endless]
    sample = scored(endless, reward_key="score")
    assert is_given_up(sample)
    assert "nested too deeply, or contains itself" in sample.metadata["failure"]["message"]
