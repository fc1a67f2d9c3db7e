"""A new estimator is one record: flag, checks, plan, rewards, credit and loss follow from it."""

from __future__ import annotations

import statistics
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from slime.algorithms import (
    ESTIMATORS,
    Credit,
    CreditData,
    Estimator,
    Ragged,
    default_estimator,
    find_estimator,
    formula,
)
from slime.algorithms.arguments import AlgorithmArgs, DistillationArgs
from slime.algorithms.credit import group_relative
from slime.algorithms.policy_loss import PolicyTokens, policy_loss
from slime.algorithms.reduce import Samples
from slime.backends.training.credit import CustomFunctions, add_credit
from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.config.plan import build
from slime.data.sample import Sample
from slime.observability.rollout_metrics import compute_metrics_from_samples
from tests.unit.config.tiny_command import TinyCommand, make_command

TOY = Estimator(
    "toy",
    credit=f"{__name__}:toy_credit",
    surrogate=f"{__name__}:toy_surrogate",
    is_centered=True,
    needs_critic=True,
    needs_whitening=True,
    paper_eps_clip=0.5,
)


def toy_credit(data: CreditData, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    """Twice the reward."""
    once = group_relative(data, kl, settings)
    return Credit([2 * row for row in once.advantages], once.returns)


def toy_surrogate(
    log_ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, settings: AlgorithmArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE."""
    return -log_probs * advantages, torch.zeros_like(log_ratio)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyCommand:
    """A command of a slime that has the toy estimator: one entry of the table, nothing else."""
    monkeypatch.setitem(ESTIMATORS, TOY.name, TOY)
    return make_command(tmp_path)


@pytest.mark.parametrize("record", ESTIMATORS.values(), ids=lambda record: record.name)
def test_every_record_names_functions_that_exist(record: Estimator) -> None:
    for path in (record.credit, record.log_ratio, record.surrogate):
        assert callable(formula(path))


def test_an_unknown_estimator_is_an_error_and_the_default_is_known() -> None:
    with pytest.raises(ValueError, match="--advantage-estimator 'toy' is unknown"):
        find_estimator("toy")
    assert AlgorithmArgs().advantage_estimator == RewardArgs().advantage_estimator == default_estimator()


def test_flag_checks_and_plan_follow_from_the_record(command: TinyCommand) -> None:
    _, problems = command.run("--advantage-estimator", "toy")
    assert "--advantage-estimator toy needs --normalize-advantages." in problems
    flags = ("--advantage-estimator", "toy", "--normalize-advantages", "--kl-coef", "0.1", "--gae-trained-tokens-only")
    args = command.resolve(*flags)
    assert args.use_critic
    warnings = command.warnings(*flags)
    assert "--eps-clip 0.2: toy cuts off small ratios too; its paper uses 0.5 here" in warnings
    assert "--kl-coef: 0.1 has no effect with --advantage-estimator toy" in warnings
    assert "--gae-trained-tokens-only" not in warnings  # read if the run has a critic
    assert args.n_samples_per_prompt == 4
    assert command.resolve(*flags, without=("--n-samples-per-prompt",)).n_samples_per_prompt == 8
    assert (
        "--n-samples-per-prompt 1 makes every group-relative advantage zero"
        in command.run(*flags, "--n-samples-per-prompt", 1)[1]
    )
    placement = build(args, title="toy", device_bytes=2**30).placement
    assert placement is not None
    assert placement.has_critic


def test_rewards_credit_loss_and_metrics_follow_from_the_record(command: TinyCommand) -> None:
    samples = [
        Sample(index=i, group_index=i // 2, tokens=[1, 2, 3], response_length=2, reward=float(r))
        for i, r in enumerate((1, 4, 2, 2))
    ]
    columns = compile_train_data(samples, rewards=RewardArgs(advantage_estimator="toy", n_samples_per_prompt=2))
    assert columns["rewards"] == [-1.5, 1.5, 0.0, 0.0]  # centered, not scaled
    settings = AlgorithmArgs(advantage_estimator="toy")
    add_credit(columns, settings, DistillationArgs(), CustomFunctions(), None)
    assert [row.tolist() for row in columns["advantages"]] == [[-3.0] * 2, [3.0] * 2, [0.0] * 2, [0.0] * 2]
    log_probs = torch.linspace(-2.0, -0.5, 8, requires_grad=True)
    tokens = PolicyTokens(log_probs=log_probs, advantages=torch.cat(columns["advantages"]))
    masks = [torch.ones(2)] * 4
    loss = policy_loss(tokens, settings, Samples([2] * 4, masks, torch.full((4,), 2.0)))
    products = (-log_probs * tokens.advantages).detach().split(2)
    assert float(loss.loss.detach()) == pytest.approx(sum(statistics.fmean(part.tolist()) for part in products))
    logged = Namespace(
        reward_key=None, advantage_estimator="toy", log_reward_category=None, log_passrate=False, rollout_num_gpus=2
    )
    assert not any(name.startswith("zero_std") for name in compute_metrics_from_samples(logged, samples))
