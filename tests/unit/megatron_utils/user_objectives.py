"""Users' functions for test_loss_objectives: what people write who replace a part of the objective."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from slime.backends.megatron_utils.cp_utils import (
    all_gather_with_cp,
    get_logits_and_tokens_offset_with_cp,
    get_sum_of_sample_mean,
    slice_log_prob_with_cp,
)
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_responses, policy_loss_function


def same_loss(args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """The built-in loss under another name of its metric."""
    loss, metrics = policy_loss_function(args, batch, logits, sum_of_sample_mean)
    return loss, {"loss": loss, "mine": metrics["pg_loss"]}


def loss_with_a_metric_of_one_rank(
    args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any
) -> Any:
    """The built-in loss. The ranks return different metrics, and so do the micro-batches of a rank."""
    loss, metrics = policy_loss_function(args, batch, logits, sum_of_sample_mean)
    if torch.distributed.get_rank() == 0 and len(batch["total_lengths"]) > 1:
        metrics = {"num_groups": torch.ones(())} | metrics
    return loss, metrics


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


def sequence_loss(args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """GSPO, written for a rank's part of the responses: from logits, with sequences gathered and cut again."""
    totals, lengths, masks = batch["total_lengths"], batch["response_lengths"], batch["loss_masks"]
    parts = get_responses(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=totals, response_lengths=lengths
    )
    losses = []
    for index, (rows, targets) in enumerate(parts):
        log_probs = rows[:, : args.vocab_size].log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        drift = all_gather_with_cp(batch["log_probs"][index] - log_probs, totals[index], lengths[index])
        mean = (drift * masks[index]).sum() / masks[index].sum().clamp(min=1)
        ratio = torch.exp(-slice_log_prob_with_cp(mean.expand(lengths[index]), totals[index], lengths[index]))
        advantages = batch["advantages"][index]
        losses.append(-torch.min(ratio * advantages, ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip) * advantages))
    reduce = get_sum_of_sample_mean(totals, lengths, masks, batch["rollout_mask_sums"], args.calculate_per_token_loss)
    loss = reduce(torch.cat(losses))
    torch.testing.assert_close(loss, sum_of_sample_mean(torch.cat(losses)))
    return loss, {"loss": loss, "mine": loss}


def tis_of_gathered_parts(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
) -> Any:
    """One weight per sequence."""
    weights = []
    for train, engine, mask, *sample in zip(
        train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, strict=True
    ):
        drift = (all_gather_with_cp(train - engine, *sample) * mask).sum().clamp(-1, 1)
        weights.append(slice_log_prob_with_cp(drift.exp().expand(len(mask)), *sample))
    weight = torch.cat(weights).detach()
    return pg_loss * weight, loss_masks, {"weight": weight}


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


def token_sum_of_parts(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[torch.Tensor], per_token: bool
) -> Any:
    """The same by a user who knows that a rank holds two chunks of a sample."""
    parts = []
    for total, response, mask in zip(total_lengths, response_lengths, loss_masks, strict=True):
        *_, tokens = get_logits_and_tokens_offset_with_cp(total, response)
        prompt = total - response
        parts += [mask[max(first - prompt, 0) : max(end - prompt, 0)] for first, end in tokens]
    mask = torch.cat(parts)
    return lambda values: (values * mask).sum() / 7.0


def not_a_pair(args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    return logits.sum()


def no_reward(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    assert rollout_id == 0
    rollout_data["advantages"] = [torch.zeros_like(row) for row in rollout_data["advantages"]]


def no_reward_either(args: Namespace, rollout_data: dict[str, Any]) -> None:
    no_reward(args, 0, rollout_data)
