"""Users' functions for test_loss_objectives: what people write who replace a part of the objective."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, policy_loss_function


def same_loss(args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """The built-in loss under another name of its metric."""
    loss, metrics = policy_loss_function(args, batch, logits, sum_of_sample_mean)
    return loss, {"loss": loss, "mine": metrics["pg_loss"]}


def likelihood(args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """Supervised training, from the logits."""
    _, columns = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    assert batch["advantages"] is None
    assert batch["full_loss_masks"].sum() == sum(mask.sum() for mask in batch["loss_masks"])
    loss = -sum_of_sample_mean(torch.cat(columns["log_probs"]))
    return loss, {"loss": loss}


def same_advantages(args: Namespace, rollout_data: dict[str, Any]) -> None:
    rows = [
        torch.full((n,), reward)
        for n, reward in zip(rollout_data["response_lengths"], rollout_data["rewards"], strict=True)
    ]
    assert all(
        len(row) == n for row, n in zip(rollout_data["log_probs"], rollout_data["response_lengths"], strict=True)
    )
    rollout_data["advantages"] = rollout_data["returns"] = rows


def no_returns(args: Namespace, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"] = [torch.zeros(n) for n in rollout_data["response_lengths"]]


def short_advantages(args: Namespace, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"] = rollout_data["returns"] = [torch.zeros(1) for _ in rollout_data["response_lengths"]]


def token_sum(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[torch.Tensor], per_token: bool
) -> Any:
    """Sum over trained tokens divided by a constant, as Dr. GRPO has it."""
    mask = torch.cat(loss_masks)
    return lambda values: (values * mask).sum() / 7.0


def not_a_pair(args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    return logits.sum()


def no_reward(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    assert rollout_id == 0
    rollout_data["advantages"] = [torch.zeros_like(row) for row in rollout_data["advantages"]]


def no_reward_either(args: Namespace, rollout_data: dict[str, Any]) -> None:
    no_reward(args, 0, rollout_data)
