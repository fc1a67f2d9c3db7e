"""From rewards to the advantage of every response token: KL in the rewards, estimator, distillation, whitening.

Called by the trainer once per rollout, with all of the rank's samples; every optimizer step of the rollout uses the
result. Responses are whole on every rank. The order below is the order of the terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from . import distill, grpo, ppo, reinforce_pp
from .arguments import AlgorithmArgs
from .kl import approx_kl
from .types import Credit
from .whiten import masked_whiten

__all__ = ["CreditData", "Ragged", "distilled", "estimate", "normalize", "reward_kl"]

Ragged: TypeAlias = Sequence[torch.Tensor]
"""One tensor ``[R_i]`` per sample."""


@dataclass(frozen=True)
class CreditData:
    """What credit may depend on; each ragged field has one fp32 ``[R_i]`` per sample, or is None.

    Attributes:
        rewards: per sample, after normalisation by group where the estimator wants it.
        response_lengths: ``R_i``.
        loss_masks: per sample ``[R_i]``, 1 = trained.
        log_probs: of the policy that is corrected by KL terms: the old policy, or the engine's.
        ref_log_probs: of the reference model.
        values: of the critic.
    """

    rewards: Sequence[float]
    response_lengths: Sequence[int]
    loss_masks: Ragged
    log_probs: Ragged | None = None
    ref_log_probs: Ragged | None = None
    values: Ragged | None = None


def reward_kl(data: CreditData, settings: AlgorithmArgs) -> list[torch.Tensor]:
    """The KL divergence from the reference that enters the rewards, ``[R_i]`` per sample; zeros without ``--kl-coef``.

    Raises:
        ValueError: ``--kl-coef`` is set, but one of the two models has not been run.
    """
    if settings.kl_coef == 0:
        device = data.loss_masks[0].device if data.loss_masks else None
        return [torch.zeros(length, device=device) for length in data.response_lengths]
    if data.log_probs is None or data.ref_log_probs is None:
        missing = "reference model" if data.ref_log_probs is None else "old policy"
        raise ValueError(f"--kl-coef {settings.kl_coef} needs the log-probs of the {missing}, which has not been run.")
    return [
        approx_kl(policy, base.to(policy.device), settings.kl_loss_type)
        for policy, base in zip(data.log_probs, data.ref_log_probs, strict=True)
    ]


def estimate(data: CreditData, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    """Advantages and returns by ``--advantage-estimator``, before distillation and whitening.

    Raises:
        ValueError: unknown estimator, or ppo without values.
    """
    match settings.advantage_estimator:
        case "grpo" | "gspo" | "cispo":
            device = kl[0].device if kl else None
            return grpo.credit(data.rewards, data.response_lengths, device=device)
        case "reinforce_plus_plus":
            return reinforce_pp.credit(
                data.rewards, kl, data.loss_masks, kl_coef=settings.kl_coef, gamma=settings.gamma
            )
        case "reinforce_plus_plus_baseline":
            return reinforce_pp.baseline_credit(data.rewards, kl, kl_coef=settings.kl_coef)
        case "ppo":
            if data.values is None:
                raise ValueError("--advantage-estimator ppo: the batch has no values; the critic has not been run.")
            return ppo.credit(
                data.rewards,
                data.values,
                kl,
                kl_coef=settings.kl_coef,
                gamma=settings.gamma,
                lambd=settings.lambd,
                only=data.loss_masks if settings.gae_trained_tokens_only else None,
            )
        case other:
            raise ValueError(f"--advantage-estimator {other!r} is unknown")


def distilled(credit: Credit, student: Ragged, teacher: Ragged, coef: float) -> tuple[Credit, list[torch.Tensor]]:
    """Credit minus ``coef`` times the reverse KL from the teacher, and that divergence. Returns are not touched."""
    divergence = distill.reverse_kl(student, teacher)
    return Credit(distill.penalise(credit.advantages, divergence, coef), credit.returns), divergence


def normalize(
    advantages: Ragged,
    loss_masks: Ragged,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    """Whiten over the trained tokens of all data-parallel ranks; a rank without samples must call this too.

    Source: REINFORCE++, arXiv:2501.03262: normalisation over the global batch.

    Where no rank has a trained token there is nothing to learn and nothing to normalise: advantages stay as they are.

    Args:
        device: where ``group`` communicates (nccl knows no cpu tensors); the result is where the advantages are.
    """
    if not advantages and group is None:
        return []
    flat = torch.cat([row.float() for row in advantages]) if advantages else torch.zeros(0)
    mask = torch.cat([row.to(flat.device) for row in loss_masks]) if advantages else torch.zeros(0)
    try:
        # collective: also with nothing to add
        whitened = masked_whiten(flat.to(device), mask.to(device), group).to(flat.device)
    except ValueError:  # on all ranks alike
        whitened = flat
    return list(torch.split(whitened, [len(row) for row in advantages])) if advantages else []
