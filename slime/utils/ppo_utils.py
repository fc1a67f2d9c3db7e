"""Public alias of the policy-gradient formulae; they live in ``slime.algorithms``."""

from __future__ import annotations

from slime.algorithms.cispo import cispo_loss as compute_cispo_loss
from slime.algorithms.clip import clipped_surrogate as compute_policy_loss
from slime.algorithms.compat import (
    calculate_log_probs_and_entropy,
    compute_gspo_kl,
    compute_opsm_mask,
    get_advantages_and_returns_batch,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
)
from slime.algorithms.gae import chunked_discounted_returns, chunked_gae, vanilla_gae
from slime.algorithms.kl import approx_kl as compute_approx_kl

__all__ = [
    "calculate_log_probs_and_entropy",
    "chunked_discounted_returns",
    "chunked_gae",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_gspo_kl",
    "compute_opsm_mask",
    "compute_policy_loss",
    "get_advantages_and_returns_batch",
    "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
    "vanilla_gae",
]
