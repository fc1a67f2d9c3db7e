"""Computes the advantage of every response token: KL in the rewards, estimator, distillation, whitening.

Called by the trainer once per rollout, with all of the rank's samples. Every optimizer step of the rollout uses the
result. Responses are whole on every rank. The order below is the order of the terms. The last functions are the
estimators GRPO and REINFORCE++. That of PPO is in ``ppo``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slime.algorithms import Credit, CreditData, Ragged, find_estimator, formula
from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.policy_loss import approx_kl
from slime.algorithms.ppo import chunked_discounted_returns


def reward_kl(data: CreditData, settings: AlgorithmArgs) -> list[torch.Tensor]:
    """The KL divergence from the reference that enters the rewards, ``[R_i]`` per sample: zeros without ``--kl-coef``.

    Raises:
        ValueError: ``--kl-coef`` is set, but one of the two models has not been run.
    """
    if settings.kl_coef == 0:
        device = data.loss_masks[0].device if data.loss_masks else None
        return [torch.zeros(length, device=device) for length in data.response_lengths]
    if data.log_probs is None or data.ref_log_probs is None:
        missing = "reference model" if data.ref_log_probs is None else "old policy"
        raise ValueError(f"--kl-coef {settings.kl_coef} needs the log-probs of the {missing}, which has not been run.")
    rows = [
        approx_kl(policy, base.to(policy.device), settings.kl_loss_type)
        for policy, base in zip(data.log_probs, data.ref_log_probs, strict=True)
    ]
    if settings.use_rollout_logprobs:
        # the engine has not sampled the other tokens, and samples have 0 in place of their log-probs
        rows = [
            torch.where(mask.to(row.device) != 0, row, 0.0) for row, mask in zip(rows, data.loss_masks, strict=True)
        ]
    return rows


def estimate(data: CreditData, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    """Advantages and returns by ``--advantage-estimator``, before distillation and whitening.

    Raises:
        ValueError: unknown estimator, or data that it needs is missing.
    """
    credit: Credit = formula(find_estimator(settings.advantage_estimator).credit)(data, kl, settings)
    return credit


def distilled(credit: Credit, student: Ragged, teacher: Ragged, coef: float) -> tuple[Credit, list[torch.Tensor]]:
    """On-policy distillation: ``A_t - coef * divergence_t``, and that divergence. Returns do not change.

    Source: Agarwal et al. 2023, arXiv:2306.13649 (student samples, reverse KL); Thinking Machines Lab, "On-Policy
    Distillation" (2025), which uses it as the advantage.

    Returns:
        The divergence is ``log pi_student - log pi_teacher`` per token, the single-sample estimate of
        KL(student || teacher): fp32 ``[R_i]`` per sample on the device of the student.
    """
    divergence = [a.float() - b.to(a.device).float() for a, b in zip(student, teacher, strict=True)]
    advantages = [a - coef * d.to(a.device) for a, d in zip(credit.advantages, divergence, strict=True)]
    return Credit(advantages, credit.returns), divergence


def normalize(
    advantages: Ragged, loss_masks: Ragged, group: dist.ProcessGroup | None, *, device: torch.device | None = None
) -> list[torch.Tensor]:
    """Whiten over the trained tokens of all data-parallel ranks. A rank without samples must call this too.

    Source: REINFORCE++, arXiv:2501.03262: normalization over the global batch.

    If no rank has a trained token, advantages stay unchanged.

    Args:
        device: of ``group``'s communication (nccl takes no cpu tensors). The result is on the device of the advantages.
    """
    if not advantages and group is None:
        return []
    # a rank without samples must join the collectives of masked_whiten
    flat = torch.cat([row.float() for row in advantages]) if advantages else torch.zeros(0)
    mask = torch.cat([row.to(flat.device) for row in loss_masks]) if advantages else torch.zeros(0)
    try:
        whitened = masked_whiten(flat.to(device), mask.to(device), group).to(flat.device)
    except ValueError:  # no rank has a trained token, so all ranks come here
        whitened = flat
    return list(torch.split(whitened, [len(row) for row in advantages])) if advantages else []


def masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + epsilon)``. Mean and unbiased variance over ``mask != 0`` on all ranks of ``group``.

    Values that are all equal give 0. All elements are transformed, masked ones too. Every rank of the group must call
    this, also one without values.

    Args:
        values: any shape.
        mask: same shape.
        group: ranks that share the statistics. None means this rank alone.
        shift_mean: False adds the mean back.

    Returns:
        fp32, same shape.

    Raises:
        ValueError: no rank has a trained token. All ranks raise it.
    """
    is_trained = mask != 0
    # two passes in fp64: E[x^2] - E[x]^2 in fp32 would give large, almost equal values a variance of rounding errors
    x = values.double()
    trained = x[is_trained]
    totals = torch.stack([trained.sum(), is_trained.sum().double()])
    if group is not None:
        dist.all_reduce(totals, group=group)
    count = float(totals[1])
    # the count is that of all ranks: they raise together, and none waits for the others
    if count == 0:
        raise ValueError("advantages cannot be normalized: the loss mask of every sample on every rank is zero.")
    mean = totals[0] / count
    squares = (trained - mean).square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    # unbiased, but a single trained token has variance 0 and not 0 / 0
    variance = squares / max(count - 1, 1)
    whitened = (x - mean) * torch.rsqrt(variance + epsilon)
    return (whitened if shift_mean else whitened + mean).float()


def group_relative(data: CreditData, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    """GRPO: ``A_{i,t} = R_i`` for every response token t of sample i. ``batch.rewards`` has normalized ``R``.

    Source: DeepSeekMath, Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision). The reference-model
    KL is a term of the loss there, not of the advantage.

    Args:
        kl: gives the device.

    Returns:
        fp32 tensors ``[R_i]``. Advantages and returns are the same tensors.
    """
    device = kl[0].device if kl else None
    advantages = [
        torch.full((length,), float(reward), dtype=torch.float32, device=device)
        for reward, length in zip(data.rewards, data.response_lengths, strict=True)
    ]
    # shared memory: later terms of the advantage must not be added in place
    return Credit(advantages=advantages, returns=list(advantages))


def reinforce_pp(data: CreditData, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    """Discounted return of each token. The KL penalty is a reward per token.

    Source: REINFORCE++, Hu et al. 2025, arXiv:2501.03262, discounted with the KL penalty of InstructGPT:

        r_t = -kl_coef kl_t m_t + [t is the last trained token] R        A_t = G_t = r_t + gamma G_{t+1}

    ``R`` is not normalized by group. A fully masked sample gets zeros.

    Returns:
        fp32 tensors ``[R_i]``. Advantages and returns are the same tensors.
    """
    rows = []
    for reward, estimate, mask in zip(data.rewards, kl, data.loss_masks, strict=True):
        is_trained = mask.to(estimate.device) != 0
        row = torch.where(is_trained, -settings.kl_coef * estimate.float(), 0.0)
        trained = is_trained.nonzero()
        if trained.numel():
            # the last trained token, not the last token: a response may end with the output of a tool
            row[trained[-1]] += reward
        rows.append(row)
    returns = _discounted(rows, settings.gamma)
    # shared memory: later terms of the advantage must not be added in place
    return Credit(advantages=returns, returns=list(returns))


def reinforce_pp_baseline(data: CreditData, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    """``A_t = R - kl_coef kl_t``. ``R`` is already relative to the mean of its group.

    Source: REINFORCE++-baseline, arXiv:2501.03262; without division by the group's deviation.

    Returns:
        fp32 tensors ``[R_i]``. Advantages and returns are the same tensors.
    """
    advantages = [
        float(reward) - settings.kl_coef * estimate.float() for reward, estimate in zip(data.rewards, kl, strict=True)
    ]
    return Credit(advantages=advantages, returns=list(advantages))


def _discounted(rows: Ragged, gamma: float) -> list[torch.Tensor]:
    if not rows:
        return []
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    returns = chunked_discounted_returns(padded, gamma)
    # clone: a view would keep the padded batch in memory
    return [row[: len(original)].clone() for row, original in zip(returns, rows, strict=True)]
