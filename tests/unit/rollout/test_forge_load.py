"""Dumps are replayed as they were, while the engines stay up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.data.dump_file import save_debug_rollout_data
from slime.data.sample import Sample
from slime.hooks import check_hooks
from slime.rollout.forge_load import generate_rollout
from slime.utils.errors import ConfigError, DataError
from tests.unit.config.tiny_command import make_command
from tests.unit.rollout.fake_engine import make_args

FUNCTION = "slime.rollout.forge_load.generate_rollout"


def made(number: int, reward: Any = 1.0) -> Sample:
    sample = Sample(group_index=number // 2, index=number, rollout_id=7, prompt="1+1=", tokens=[3, 4], reward=reward)
    sample.append_response_tokens(tokens=[number], log_probs=[-0.5])
    sample.weight_versions = ["12"]
    sample.status = Sample.Status.TRUNCATED if number else Sample.Status.COMPLETED
    return sample


def dump(template: Path, number: int, samples: list[Sample], *, evaluation: bool = False) -> None:
    data: Any = {"set": {"samples": samples}} if evaluation else samples
    save_debug_rollout_data(str(template), data, rollout_id=number, evaluation=evaluation)


def args_of(template: Path | None, **more: Any) -> Any:
    return make_args("model", 0, load_forge_rollout_data=None if template is None else str(template), **more)


def test_a_template_replays_each_rollout_and_the_first_where_there_is_none(tmp_path: Path) -> None:
    template = tmp_path / "{rollout_id}.pt"
    for number in (0, 2):
        dump(template, number, [made(number), made(number + 1)])
    args = args_of(template)
    drawn = [generate_rollout(args, rollout_id, None).samples for rollout_id in range(3)]
    assert [[sample.index for sample in samples] for samples in drawn] == [[0, 1], [0, 1], [2, 3]]
    kept = drawn[2][0]
    assert (kept.tokens, kept.rollout_log_probs, kept.rollout_id) == ([3, 4, 2], [-0.5], 7)
    assert kept.weight_versions == []  # the engines hold other weights: their provenance cannot be checked


def test_a_literal_path_is_every_rollout_and_no_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "one.pt"
    dump(file, 0, [made(0)])
    assert [s.index for s in generate_rollout(args_of(file), 5, None).samples] == [0]
    assert generate_rollout(args_of(file), 5, None, evaluation=True).data == {}


def test_a_dumped_evaluation_becomes_a_set_of_its_own(tmp_path: Path) -> None:
    template = tmp_path / "{rollout_id}.pt"
    dump(template, 3, [made(0, {"score": 0.5}), made(1, None)], evaluation=True)
    args = args_of(template, reward_key="score")
    (name, result), *rest = generate_rollout(args, 3, None, evaluation=True).data.items()
    assert (name, rest) == ("forge_eval", [])
    assert result["rewards"] == [0.5, 0.0]
    assert result["truncated"] == [False, True]
    assert [sample.get_reward_value(args) for sample in result["samples"]] == [0.5, 0.0]
    assert generate_rollout(args, 4, None, evaluation=True).data == {}


def test_what_is_replayed_can_be_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "one.pt"
    dump(file, 0, [made(0, 1.0), made(1, 0.0)])
    rewards = RewardArgs(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=False)
    data = compile_train_data(generate_rollout(args_of(file), 0, None).samples, rewards=rewards)
    assert data["rewards"] == [0.5, -0.5]


def test_missing_flags_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--load-forge-rollout-data TEMPLATE"):
        generate_rollout(args_of(None), 0, None)
    with pytest.raises(DataError, match=r"neither .*3\.pt nor .*0\.pt"):
        generate_rollout(args_of(tmp_path / "{rollout_id}.pt"), 3, None)
    (tmp_path / "0.pt").write_text("no dump")
    with pytest.raises(DataError, match=r"--load-forge-rollout-data: .*not a rollout dump"):
        generate_rollout(args_of(tmp_path / "{rollout_id}.pt"), 3, None)


def test_flag_and_function_belong_together(tmp_path: Path) -> None:
    command = make_command(tmp_path)
    _, problems = command.run("--rollout-function-path", FUNCTION)
    assert "it needs --load-forge-rollout-data" in problems
    _, problems = command.run("--load-forge-rollout-data", "{dir}/x.pt")
    assert f"is read by --rollout-function-path {FUNCTION}" in problems
    args = command.resolve("--rollout-function-path", FUNCTION, "--load-forge-rollout-data", "x.pt")
    assert args.load_forge_rollout_data == str(Path.cwd() / "x.pt")
    assert not args.debug_train_only  # the engines are started
    assert check_hooks(args) == []
