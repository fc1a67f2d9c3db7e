"""The functions of this room with the argument order of users' code, exported by ``slime.utils.ppo_utils``.

Nothing inside slime calls them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.distributed as dist

from slime.algorithms import CreditData, credit
from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.logprobs import log_probs_and_entropy
from slime.algorithms.policy_loss import drifted_tokens, sequence_log_ratio
from slime.algorithms.ppo import chunked_gae, vanilla_gae
from slime.algorithms.reduce import Samples

Ragged = list[torch.Tensor]


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: torch.Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probs ``[T, 1]``, or ``(0,)`` for no rows; entropy ``[T]`` or None) of logits ``[T, V / tensor ranks]``.

    Args:
        log_prob_keep_mask: ``[T, V / tensor ranks]`` bool, the nucleus that was sampled from. The token itself always
            belongs to it. The entropy stays that of the whole vocabulary.
    """
    # without process groups this process holds the whole vocabulary
    group = tp_group if dist.is_initialized() else None
    log_probs, entropy = log_probs_and_entropy(
        logits,
        tokens,
        group=group,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        with_entropy_grad=with_entropy_grad,
        keep=log_prob_keep_mask,
    )
    # users' code relies on the shape (0,) of an empty batch
    return log_probs.unsqueeze(-1) if len(tokens) else log_probs, entropy


def compute_opsm_mask(
    args: Namespace, full_log_probs: Ragged, full_old_log_probs: Ragged, advantages: Ragged, loss_masks: Ragged
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``[N]`` 1 = keep, share of dropped tokens summed over samples). Arguments have one ``[R_i]`` per sample."""
    samples = _samples(loss_masks)
    new, old, credit = (torch.cat(rows) for rows in (full_log_probs, full_old_log_probs, advantages))
    dropped = drifted_tokens(new, old, credit, samples, args.opsm_delta)
    return 1 - dropped, samples.means(dropped).sum()


def compute_gspo_kl(
    full_log_probs: Ragged, full_old_log_probs: Ragged, local_log_probs: Ragged, loss_masks: Ragged
) -> torch.Tensor:
    """``[N]``: the mean of ``old - new`` over each sample, at all of its tokens."""
    del local_log_probs  # the full responses are here
    return sequence_log_ratio(torch.cat(full_log_probs), torch.cat(full_old_log_probs), _samples(loss_masks))


def get_grpo_returns(rewards: torch.Tensor, kl: Ragged) -> Ragged:
    """``rewards[i]`` at every token of ``kl[i]``."""
    return credit.group_relative(_credit_data(rewards, kl), kl, AlgorithmArgs()).advantages


def get_reinforce_plus_plus_returns(
    rewards: torch.Tensor,
    kl: Ragged,
    loss_masks: Ragged,
    response_lengths: list[int],
    total_lengths: list[int],
    kl_coef: float,
    gamma: float,
) -> Ragged:
    """Discounted returns of REINFORCE++, ``[R_i]`` per sample."""
    del response_lengths, total_lengths  # every row already is a whole response
    return credit.reinforce_pp(
        _credit_data(rewards, loss_masks), kl, AlgorithmArgs(kl_coef=kl_coef, gamma=gamma)
    ).returns


def get_reinforce_plus_plus_baseline_advantages(
    rewards: torch.Tensor, kl: Ragged, loss_masks: Ragged, kl_coef: float
) -> Ragged:
    """``rewards[i] - kl_coef * kl[i]``."""
    data = _credit_data(rewards, loss_masks)
    return credit.reinforce_pp_baseline(data, kl, AlgorithmArgs(kl_coef=kl_coef)).advantages


@torch.no_grad()
def get_advantages_and_returns_batch(
    total_lengths: list[int],
    response_lengths: list[int],
    values_list: Ragged,
    rewards_list: Ragged,
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[Ragged, Ragged]:
    """GAE of ragged rows: (advantages, returns), ``[R_i]`` per sample. Rewards are per token."""
    del total_lengths
    if not values_list:
        return [], []
    pad = torch.nn.utils.rnn.pad_sequence
    padded = [pad(rows, batch_first=True).to(values_list[0].dtype) for rows in (rewards_list, values_list)]
    gae = chunked_gae if chunked else vanilla_gae
    advantages, returns = gae(padded[0], padded[1], gamma, lambd)
    return _cut(advantages, response_lengths), _cut(returns, response_lengths)


def _credit_data(rewards: torch.Tensor, loss_masks: Ragged) -> CreditData:
    return CreditData(rewards.tolist(), [len(row) for row in loss_masks], loss_masks)


def _cut(rows: torch.Tensor, lengths: Sequence[int]) -> Ragged:
    return [row[:n] for row, n in zip(rows, lengths, strict=True)]


def _samples(loss_masks: Ragged) -> Samples:
    device = loss_masks[0].device if loss_masks else None
    # only masks and means are read, which need no sums of rollouts
    return Samples([len(mask) for mask in loss_masks], loss_masks, torch.zeros(len(loss_masks), device=device))
