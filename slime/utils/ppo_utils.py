"""Public alias of the policy-gradient formulae; they live in ``slime.algorithms``."""

from __future__ import annotations

from slime.algorithms.clip import clipped_surrogate as compute_policy_loss
from slime.algorithms.kl import approx_kl as compute_approx_kl

__all__ = ["compute_approx_kl", "compute_policy_loss"]
