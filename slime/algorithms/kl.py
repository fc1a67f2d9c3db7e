"""Per-token estimators of KL(policy || base) and the importance ratio. Element-wise, without reduction.

Called by the losses with tensors of equal shape.
"""

from __future__ import annotations

import torch

_LOW_VAR_BOUND = 10.0


def importance_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """``r = pi_new(token) / pi_old(token)``, with gradient through both arguments that have one."""
    return torch.exp(log_probs.float() - old_log_probs.float())


def approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate KL(pi || pi_base) from tokens sampled from pi.

    Source: J. Schulman, "Approximating KL Divergence" (2020). With ``d = log pi - log pi_base`` (positive if the
    token is more likely under the policy than under the base):

        k1              d                    unbiased, may be negative
        k2              d^2 / 2              its gradient is the exact gradient of the reverse KL
        k3, low_var_kl  exp(-d) - 1 + d      unbiased, never negative, low_var_kl clamped to [-10, 10]

    Args:
        log_probs: log-probs of the policy, any shape.
        log_probs_base: log-probs of the base, same shape.
        kl_loss_type: one of the names above.
        importance_ratio: pi / pi_old, a weight on the estimate for tokens that were sampled from pi_old.

    Returns:
        fp32 tensor of the same shape.

    Raises:
        ValueError: unknown ``kl_loss_type``.
    """
    d = log_probs.float() - log_probs_base.float()
    match kl_loss_type:
        case "k1":
            # as a loss its expected gradient on-policy is zero, see --kl-loss-type
            kl = d
        case "k2":
            kl = d.square() / 2
        case "k3" | "low_var_kl":
            kl = torch.expm1(-d) + d  # expm1: no cancellation if the two policies nearly agree
        case _:
            raise ValueError(f"--kl-loss-type {kl_loss_type!r} is unknown. Use k1, k2, k3 or low_var_kl.")
    if importance_ratio is not None:
        # before the clamp, which bounds the weighted estimate
        kl = kl * importance_ratio
    return kl.clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND) if kl_loss_type == "low_var_kl" else kl
