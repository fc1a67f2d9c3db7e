"""The numbers that --ci-test expects of a run, and the norms that two runs compare."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.backends import TrainReport
from slime.utils.errors import DataError
from slime_plugins.ci_test import ExpectationFailed, check_expectations
from tests.unit.config.tiny_command import TinyCommand, make_command
from tests.unit.ray.test_run_wiring import make_manager

ROLLOUT = {"log_probs": -0.5, "ref_log_probs": -0.5, "entropy": 0.4}
STEP = {"ppo_kl": 0.0, "kl_loss": 0.0, "train_rollout_logprob_abs_diff": 0.02, "grad_norm": 1.5, "mtp_loss": 2.0}


@pytest.fixture
def command(tmp_path: Path) -> TinyCommand:
    return make_command(tmp_path)


def problems(args, rollout: dict | None = None, *steps: dict, rollout_id: int = 0) -> str:
    report = TrainReport([STEP | step for step in steps] or [STEP], ROLLOUT | (rollout or {}))
    try:
        check_expectations(args, rollout_id, report)
    except ExpectationFailed as error:
        return str(error)
    return ""


def test_numbers_of_a_healthy_run_pass_and_none_is_expected_that_the_run_does_not_have(command: TinyCommand) -> None:
    args = command.resolve("--ci-test")
    assert problems(args) == ""
    check_expectations(args, 0, TrainReport([{"loss": 1.0}], {}))
    check_expectations(args, 0, TrainReport())


@pytest.mark.parametrize(
    ("rollout", "step", "message"),
    [
        ({"log_probs": -1.5, "ref_log_probs": -1.5}, {}, "rollout/log_probs of rollout 0 is -1.5, it must be above -1"),
        ({"log_probs": math.nan, "ref_log_probs": 0.0}, {}, "rollout/log_probs of rollout 0 is nan"),
        ({"entropy": 1.2}, {}, "rollout/entropy of rollout 0 is 1.2, it must be above 0 and below 1"),
        ({"ref_log_probs": -0.4999}, {}, "|rollout/log_probs - rollout/ref_log_probs| of rollout 0 is 0.0001"),
        ({}, {"ppo_kl": -1e-5}, "|train/ppo_kl| of rollout 0, step 0 is 1e-05, it must be below 1e-08"),
        ({}, {"kl_loss": 2e-5}, "|train/kl_loss| of rollout 0, step 0 is 2e-05"),
        ({}, {"train_rollout_logprob_abs_diff": 0.11}, "train/train_rollout_logprob_abs_diff of rollout 0, step 0"),
        ({}, {"mtp_loss": math.inf}, "train/mtp_loss of rollout 0, step 0 is inf"),
    ],
)
def test_each_number_that_is_out_of_its_limits_is_named_with_rollout_step_and_limit(
    command: TinyCommand, rollout: dict, step: dict, message: str
) -> None:
    args = command.resolve("--ci-test")
    assert message in problems(args, rollout, step)
    assert problems(command.resolve(), rollout, step) == "", "only --ci-test expects anything"


def test_zero_is_expected_only_where_nothing_was_trained_in_between(command: TinyCommand) -> None:
    moved = {"ppo_kl": 0.1, "kl_loss": 0.1}
    args = command.resolve("--ci-test")
    assert problems(args, {}, {}, moved) == "", "a second step differs from the first"
    later = problems(args, {"ref_log_probs": -0.6}, moved, rollout_id=1)
    assert "ppo_kl" in later
    assert "kl_loss" not in later
    assert "ref_log_probs" not in later
    for flags in (["--ci-disable-kl-checker"], ["--use-routing-replay"]):
        args = command.run("--ci-test", *flags)[0]
        assert problems(args, {"ref_log_probs": -0.6}, moved) == ""
    args = command.resolve("--ci-test", "--use-rollout-logprobs")
    assert "ppo_kl" not in problems(args, {}, {"ppo_kl": 0.1})


def test_the_gap_to_the_engine_has_a_limit_of_its_own_and_may_reach_it(command: TinyCommand) -> None:
    args = command.resolve("--ci-test", "--ci-train-rollout-logprob-abs-diff-threshold", 0.3)
    assert problems(args, {}, {"train_rollout_logprob_abs_diff": 0.3}) == ""
    assert "below 0.3" in problems(args, {}, {"train_rollout_logprob_abs_diff": 0.31})


def test_norms_of_one_run_are_compared_with_those_that_another_wrote(command: TinyCommand) -> None:
    template = str(command.directory / "norms" / "{role}_{rollout_id}_{step_id}.txt")
    steps = [STEP | {"critic-grad_norm": 0.25}, STEP | {"grad_norm": 0.001}]
    check_expectations(command.resolve("--ci-save-grad-norm", template), 3, TrainReport(steps))
    args = command.resolve("--ci-load-grad-norm", template)
    near = [step | {"grad_norm": step["grad_norm"] * 1.009} for step in steps]
    check_expectations(args, 3, TrainReport(near))
    with pytest.raises(ExpectationFailed) as error:
        check_expectations(args, 3, TrainReport([steps[0] | {"critic-grad_norm": 0.27}, steps[1]]))
    assert "train/critic-grad_norm of rollout 3, step 0 is 0.27" in str(error.value)
    assert "critic_3_0.txt holds 0.25" in str(error.value)
    assert str(error.value).count("\n") == 0
    with pytest.raises(DataError, match=r"actor_4_0\.txt.*--ci-save-grad-norm"):
        check_expectations(args, 4, TrainReport(steps))


def test_a_template_that_names_one_file_for_several_norms_is_refused(command: TinyCommand) -> None:
    assert "use {rollout_id}, {step_id}" in command.run("--ci-save-grad-norm", "norms_{rollout_id}")[1]
    assert "use {rollout_id}, {step_id}" in command.run("--ci-load-grad-norm", "{rollout_id}_{step_id}_{rank}")[1]
    assert "is no template" in command.run("--ci-load-grad-norm", "{rollout_id")[1]
    both = ("--ci-save-grad-norm", "{rollout_id}_{step_id}", "--ci-load-grad-norm", "{rollout_id}_{step_id}")
    assert "--ci-load-grad-norm: no effect" in command.warnings(*both)


def test_flags_that_only_the_test_reads_are_idle_without_it(command: TinyCommand) -> None:
    limit = ("--ci-train-rollout-logprob-abs-diff-threshold", 0.2)
    assert command.warnings("--ci-disable-kl-checker", *limit).count("no effect without --ci-test") == 2
    assert command.warnings("--ci-test", "--ci-disable-kl-checker", *limit) == ""


@pytest.mark.parametrize(
    ("flags", "stopped"), [(["--ci-test", "--use-fault-tolerance"], ["stop e0"]), (["--ci-test"], [])]
)
def test_the_first_engine_is_stopped_once_where_its_death_is_made_good(
    command: TinyCommand, monkeypatch: pytest.MonkeyPatch, flags: list[str], stopped: list[str]
) -> None:
    calls: list[str] = []

    def fleet(names: list[str]) -> SimpleNamespace:
        return SimpleNamespace(
            only=lambda indices: fleet([names[i] for i in indices]),
            start=lambda verb: calls.extend(f"{verb} {name}" for name in names),
        )

    def no_groups(rollout_id: int) -> None:
        raise DataError("what comes after is not looked at")

    manager = make_manager(command.directory, *flags)
    manager._servers = SimpleNamespace(all_engines=lambda: fleet(["e0", "e1"]))  # type: ignore[assignment]
    monkeypatch.setattr(manager, "_groups", no_groups)
    for rollout_id in range(5):
        with pytest.raises(DataError):
            manager.generate(rollout_id)
    assert calls == stopped
