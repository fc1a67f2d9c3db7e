"""Objectives through the real trainer: estimators, corrections, distillation, users' functions. One process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.algorithms.arguments import AlgorithmArgs, DistillationArgs
from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.megatron_utils.loss import compute_advantages_and_returns
from slime.backends.training.credit import CustomFunctions, Passes, add_credit, passes_needed
from slime.utils.errors import ConfigError, DataError, SlimeError
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, schedule

USER = "tests.unit.megatron_utils.user_objectives"
LOSS = "slime.backends.megatron_utils.loss"
SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0, "lr": 1.0}


pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_hf_model("qwen3", path)
    return path


def two_steps() -> dict[str, Any]:
    batch = make_batch(seed=4) | {"global_batch_sizes": [4, 4]}
    return schedule(batch, [[0, 1, 2, 3], [4, 5, 6, 7]])


def train(path: Path, batch: dict[str, Any], *, with_ref: bool = False, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """(report, how far every weight moved)."""
    trainer = MegatronTrainer(make_args(path, **(SGD | overrides)), rank=0, world_size=1, with_ref=with_ref)
    trainer.setup()
    before = {name: value.clone() for name, value in trainer.export_weights()}
    report = trainer.train(0, batch)
    return report, {name: before[name] - value for name, value in trainer.export_weights()}


def assert_same_training(one: Any, other: Any, *, metrics: bool = True) -> None:
    (a, moved), (b, also) = one, other
    for name, value in moved.items():
        torch.testing.assert_close(value, also[name], atol=1e-6, rtol=1e-5)
    if metrics:
        assert [step["loss"] for step in a.steps] == pytest.approx([step["loss"] for step in b.steps], abs=1e-6)


def test_a_custom_loss_that_calls_the_builtin_one_trains_the_same(checkpoint: Path) -> None:
    settings: dict[str, Any] = {"entropy_coef": 0.05, "use_tis": True, "tis_clip": 1.5}
    builtin = train(checkpoint, two_steps(), **settings)
    custom = train(
        checkpoint,
        two_steps(),
        loss_type="custom_loss",
        custom_loss_function_path=f"{USER}.same_loss",
        **settings,
    )
    assert_same_training(builtin, custom)
    assert custom[0].steps[1]["mine"] == pytest.approx(builtin[0].steps[1]["pg_loss"], abs=1e-6)
    assert "pg_loss" not in custom[0].steps[1]


def test_a_custom_supervised_loss_equals_the_builtin_one(checkpoint: Path) -> None:
    builtin = train(checkpoint, make_batch(), loss_type="sft_loss")
    custom = train(
        checkpoint,
        make_batch(),
        loss_type="custom_loss",
        custom_loss_function_path=f"{USER}.likelihood",
        compute_advantages_and_returns=False,
    )
    assert_same_training(builtin, custom)


def test_custom_advantages_that_repeat_grpo_train_the_same(checkpoint: Path) -> None:
    builtin = train(checkpoint, make_batch())
    custom = train(checkpoint, make_batch(), custom_advantage_function_path=f"{USER}.same_advantages")
    assert_same_training(builtin, custom)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("no_returns", r"must set rollout_data\['returns'\]"), ("short_advantages", "with lengths")],
)
def test_custom_advantages_that_miss_something_are_an_error_with_the_flag(name: str, problem: str) -> None:
    args = make_args("model", custom_advantage_function_path=f"{USER}.{name}")
    columns = {"response_lengths": [2, 3]}
    with pytest.raises(ConfigError, match=f"--custom-advantage-function-path .*{name} .*{problem}"):
        CustomFunctions.load(args).fill_advantages(columns)


def test_the_builtin_importance_weights_are_also_a_hook(checkpoint: Path) -> None:
    builtin = train(checkpoint, two_steps(), use_tis=True, tis_clip=1.2, tis_clip_low=0.5)
    hook = train(
        checkpoint,
        two_steps(),
        use_tis=True,
        tis_clip=1.2,
        tis_clip_low=0.5,
        custom_tis_function_path=f"{LOSS}.vanilla_tis_function",
    )
    assert_same_training(builtin, hook)
    assert builtin[0].steps[0]["tis_clipfrac"] == hook[0].steps[0]["tis_clipfrac"] > 0
    icepop = train(
        checkpoint,
        two_steps(),
        use_tis=True,
        tis_clip=1.2,
        tis_clip_low=0.5,
        custom_tis_function_path=f"{LOSS}.icepop_function",
    )
    assert icepop[0].steps[0]["tis_clipfrac"] > 0
    assert icepop[0].steps[0]["pg_loss"] != builtin[0].steps[0]["pg_loss"]


def test_mismatch_metrics_alone_leave_the_training_as_it_is(checkpoint: Path) -> None:
    builtin = train(checkpoint, two_steps())
    helper = Path(__file__).parents[3] / "examples/train_infer_mismatch_helper/mis.py"
    settings = {
        "use_rs": True,
        "tis_level": "sequence",
        "rs_level": "geometric",
        "tis_mode": "mask",
        "tis_lower_bound": None,
        "tis_upper_bound": 2.0,
        "rs_lower_bound": None,
        "rs_upper_bound": None,
        "rs_veto_threshold": 1e-4,
        "tis_batch_normalize": False,
    }
    measured = train(
        checkpoint,
        two_steps(),
        get_mismatch_metrics=True,
        custom_tis_function_path=f"{helper}:compute_mis_weights_with_cp",
        **settings,
    )
    assert_same_training(builtin, measured)
    gap = measured[0].rollout["rollout_log_probs"] - measured[0].rollout["log_probs"]
    assert sum(step["mis_kl"] for step in measured[0].steps) / 2 == pytest.approx(gap, abs=1e-5)
    applied = train(
        checkpoint,
        two_steps(),
        use_tis=True,
        custom_tis_function_path=f"{helper}:compute_mis_weights_with_cp",
        **settings,
    )
    assert applied[0].steps[0]["pg_loss"] != builtin[0].steps[0]["pg_loss"]


def test_a_users_reducer_is_used_for_the_policy_gradient(checkpoint: Path) -> None:
    report, _ = train(checkpoint, make_batch(), custom_pg_loss_reducer_function_path=f"{USER}.token_sum")
    batch = make_batch()
    wanted = -sum(
        float(mask.sum()) * reward for mask, reward in zip(batch["loss_masks"], batch["rewards"], strict=True)
    )
    assert report.steps[0]["pg_loss"] == pytest.approx(wanted / 7.0 / 8, rel=1e-5)


@pytest.mark.parametrize("name", ["no_reward", "no_reward_either"])
def test_a_users_function_may_change_the_batch_before_the_first_step(checkpoint: Path, name: str) -> None:
    report, moved = train(checkpoint, make_batch(), rollout_data_postprocess_path=f"{USER}.{name}")
    assert report.steps[0]["pg_loss"] == report.steps[0]["grad_norm"] == 0.0
    assert all(torch.all(value == 0) for value in moved.values())


def test_a_custom_loss_that_returns_no_pair_is_an_error_with_the_flag(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SlimeError, match=r"--custom-loss-function-path .*not_a_pair must return \(loss tensor, dict"):
        train(
            checkpoint,
            make_batch(),
            loss_type="custom_loss",
            custom_loss_function_path=f"{USER}.not_a_pair",
            save=str(tmp_path),
        )


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_kl_penalty_in_the_rewards_starts_at_zero_and_grows_as_the_policy_moves(
    checkpoint: Path, estimator: str
) -> None:
    settings = {"advantage_estimator": estimator, "normalize_advantages": True, "kl_coef": 0.1, "kl_loss_type": "k2"}
    args = make_args(checkpoint, **(SGD | settings | {"lr": 0.1}))
    trainer = MegatronTrainer(args, rank=0, world_size=1, with_ref=True)
    trainer.setup()
    first, second = (trainer.train(i, make_batch()) for i in range(2))
    assert first.rollout["kl"] == 0.0
    assert second.rollout["kl"] > 1e-4
    assert first.steps[0]["ppo_kl"] == 0.0
    assert first.steps[0]["grad_norm"] > 0


def test_distilling_from_the_own_weights_changes_nothing_and_from_others_it_does(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / "teacher"
    teacher = make_hf_model("qwen3", other)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.1)
    teacher.save_pretrained(other)
    opd = {"use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.5}
    plain = train(checkpoint, make_batch())
    own = train(checkpoint, make_batch(), opd_teacher_load=str(checkpoint), **opd)
    assert_same_training(plain, own)
    assert own[0].steps[0]["opd_reverse_kl"] == own[0].rollout["opd_reverse_kl"] == 0.0
    distilled = train(checkpoint, make_batch(), opd_teacher_load=str(other), **opd)
    gap = distilled[0].rollout["log_probs"] - distilled[0].rollout["teacher_log_probs"]
    assert distilled[0].rollout["opd_reverse_kl"] == pytest.approx(gap, abs=1e-5)
    assert distilled[0].rollout["opd_reverse_kl"] != 0
    with pytest.raises(ConfigError, match=r"--opd-teacher-load .*nowhere does not exist"):
        train(checkpoint, make_batch(), opd_teacher_load=str(tmp_path / "nowhere"), **opd)


def test_distillation_during_the_rollout_needs_the_teachers_log_probs() -> None:
    columns = {
        "rewards": [1.0],
        "response_lengths": [2],
        "loss_masks": [torch.ones(2)],
        "log_probs": [torch.zeros(2)],
    }
    opd = DistillationArgs(use_opd=True, opd_type="sglang")
    with pytest.raises(DataError, match="--use-opd: the batch has no teacher_log_probs"):
        add_credit(columns, AlgorithmArgs(), opd, CustomFunctions(), None)
    columns["teacher_log_probs"] = [torch.full((2,), -1.0)]
    add_credit(columns, AlgorithmArgs(), opd, CustomFunctions(), None)
    assert columns["advantages"][0].tolist() == [0.0, 0.0]
    assert columns["opd_reverse_kl"][0].tolist() == [1.0, 1.0]
    assert columns["returns"][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "num_steps", "wanted"),
    [
        ({}, 1, Passes(credit=True)),
        ({}, 2, Passes(old=True, credit=True)),
        ({"loss_type": "sft_loss"}, 2, Passes()),
        ({"compute_advantages_and_returns": False}, 2, Passes()),
        ({"use_kl_loss": True}, 1, Passes(reference=True, credit=True)),
        ({"kl_coef": 0.1}, 1, Passes(reference=True, old=True, credit=True)),
        ({"use_rollout_logprobs": True}, 2, Passes(credit=True)),
        ({"use_rollout_logprobs": True, "get_mismatch_metrics": True}, 2, Passes(old=True, credit=True)),
        ({"loss_type": "custom_loss"}, 1, Passes(old=True, credit=True)),
        ({"use_rollout_entropy": True}, 1, Passes(old=True, credit=True)),
    ],
)
def test_only_the_passes_that_somebody_reads_are_run(settings: dict[str, Any], num_steps: int, wanted: Passes) -> None:
    assert passes_needed(AlgorithmArgs(**settings), DistillationArgs(), num_steps=num_steps) == wanted


def test_a_teacher_in_the_trainer_is_a_pass_and_one_in_a_server_is_not() -> None:
    for kind, is_pass in (("megatron", True), ("sglang", False)):
        opd = DistillationArgs(use_opd=True, opd_type=kind)
        assert passes_needed(AlgorithmArgs(), opd, num_steps=1) == Passes(teacher=is_pass, old=True, credit=True)


def test_no_entropy_is_computed_on_request(checkpoint: Path) -> None:
    report, _ = train(checkpoint, make_batch(), entropy_metric=False)
    assert "entropy_loss" not in report.steps[0]
    assert report.steps[0]["pg_loss"] != 0


def test_the_entropy_of_the_old_policys_pass_is_that_of_the_loss(checkpoint: Path) -> None:
    plain = train(checkpoint, make_batch(), rollout_temperature=0.8)
    reported = train(checkpoint, make_batch(), rollout_temperature=0.8, use_rollout_entropy=True)
    assert_same_training(plain, reported)
    assert reported[0].rollout["entropy"] == pytest.approx(plain[0].steps[0]["entropy_loss"], rel=1e-5)
    assert "entropy" not in plain[0].rollout


def test_true_on_policy_mode_says_when_trainer_and_engine_differ(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen, _ = train(checkpoint, make_batch())
    batch = make_batch()
    train(checkpoint, batch, true_on_policy_mode=True)
    assert f"differ by up to {seen.rollout['logprob_abs_diff_max']:.1e}" in caplog.text
    caplog.clear()
    train(checkpoint, make_batch(with_rollout=False), true_on_policy_mode=True)
    assert "no log-probs of the engine" in caplog.text


def test_advantages_are_computed_for_a_plain_namespace_of_a_users_program() -> None:
    args = argparse.Namespace(advantage_estimator="grpo", kl_coef=0.0, normalize_advantages=False)
    batch: dict[str, Any] = {
        "rewards": [1.0, -1.0],
        "response_lengths": [2, 1],
        "loss_masks": [torch.ones(2), torch.ones(1)],
        "log_probs": [torch.zeros(2), torch.zeros(1)],
    }
    compute_advantages_and_returns(args, batch)
    assert [row.tolist() for row in batch["advantages"]] == [[1.0, 1.0], [-1.0]]
