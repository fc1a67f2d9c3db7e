"""Flags of the objective: which loss, which advantages, how clipping, KL and entropy enter it.

Read by the trainer (loss, log-probs) and, for the two reward flags, when samples become a batch. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["AlgorithmArgs"]


@dataclass(frozen=True)
class AlgorithmArgs:
    """Algorithm."""

    advantage_estimator: Literal["grpo"] = field(
        default="grpo", metadata={"help": "How rewards become per-token advantages."}
    )
    loss_type: Literal["policy_loss", "sft_loss"] = field(
        default="policy_loss", metadata={"help": "Training objective: clipped policy gradient, or supervised."}
    )
    eps_clip: float = field(
        default=0.2, metadata={"help": "The probability ratio is clipped at 1 - EPS_CLIP from below."}
    )
    eps_clip_high: float | None = field(
        default=None, metadata={"help": "The ratio is clipped at 1 + EPS_CLIP_HIGH from above (default: --eps-clip)."}
    )
    eps_clip_c: float | None = field(
        default=None, metadata={"help": "Dual clip: bound (above 1) on the ratio where the advantage is negative."}
    )
    use_kl_loss: bool = field(
        default=False, metadata={"help": "Add the KL divergence from the reference model to the loss."}
    )
    kl_loss_coef: float = field(default=0.0, metadata={"help": "Weight of that KL term."})
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = field(
        default="k1",
        metadata={
            "help": "Estimator of that KL. k1 as a loss has zero expected gradient on-policy; prefer k2 or low_var_kl."
        },
    )
    use_unbiased_kl: bool = field(
        default=False, metadata={"help": "Multiply the KL estimate by the importance ratio new / old policy."}
    )
    entropy_coef: float = field(default=0.0, metadata={"help": "Weight of the entropy bonus."})
    calculate_per_token_loss: bool = field(
        default=False, metadata={"help": "Mean over all trained tokens of a step instead of the mean over rollouts."}
    )
    use_rollout_logprobs: bool = field(
        default=False, metadata={"help": "Take the engine's log-probs as the old policy and skip the trainer's pass."}
    )
    log_probs_chunk_size: int = field(
        default=-1, metadata={"help": "Rows of logits turned into log-probs at a time; -1 means all at once."}
    )
    rewards_normalization: bool = field(
        default=True,
        metadata={
            "off": "--disable-rewards-normalization",
            "help": "Use rewards as they are, not relative to their group.",
        },
    )
    grpo_std_normalization: bool = field(
        default=True,
        metadata={
            "off": "--disable-grpo-std-normalization",
            "help": "Subtract the group's mean reward but do not divide by its standard deviation (Dr. GRPO).",
        },
    )
    compute_advantages_and_returns: bool = field(
        default=True,
        metadata={
            "off": "--disable-compute-advantages-and-returns",
            "help": "Compute no advantages (supervised training).",
        },
    )
