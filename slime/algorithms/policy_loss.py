"""The policy loss of one micro-batch: clipped surrogate, optional KL to a reference model, optional entropy bonus.

Called by the trainer's loss dispatch with flat per-token tensors; knows no model, batch layout or process group. All
tensors are ``[N]``, the response tokens of the micro-batch in sample order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from .arguments import AlgorithmArgs
from .clip import clipped_surrogate
from .kl import approx_kl, importance_ratio
from .reduce import Reducer
from .types import LossOutput

__all__ = ["PolicyTokens", "policy_loss"]

Tokens: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class PolicyTokens:
    """Everything the loss needs to know about the response tokens; each ``[N]`` fp32.

    Attributes:
        log_probs: under the current weights, with graph.
        advantages: credit per token.
        entropy: of the current distribution; with graph only when it has a coefficient. None when not computed.
        old_log_probs: under the weights at the start of this rollout's training. None: the current weights still are
            those weights, the ratio is exactly 1.
        rollout_log_probs: as the engine reported them while sampling.
        ref_log_probs: under the reference model.
    """

    log_probs: Tokens
    advantages: Tokens
    entropy: Tokens | None = None
    old_log_probs: Tokens | None = None
    rollout_log_probs: Tokens | None = None
    ref_log_probs: Tokens | None = None


def policy_loss(tokens: PolicyTokens, settings: AlgorithmArgs, reduce: Reducer) -> LossOutput:
    """``loss = pg_loss - entropy_coef * entropy + kl_loss_coef * KL(policy || reference)``.

    Metrics, in this order: loss, pg_loss, entropy_loss (if entropy was computed), pg_clipfrac, ppo_kl (reduced
    ``log pi_old - log pi_new``), train_rollout_logprob_abs_diff (if the engine's log-probs are known), kl_loss (with
    ``use_kl_loss``).

    Raises:
        ValueError: log-probs that the settings need are missing.
    """
    new = tokens.log_probs
    old = _old_log_probs(tokens, settings)
    ppo_kl = old - new
    eps_high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    per_token, clipped = clipped_surrogate(ppo_kl, tokens.advantages, settings.eps_clip, eps_high, settings.eps_clip_c)
    loss = pg_loss = reduce(per_token)
    metrics = {"pg_loss": pg_loss}

    if tokens.entropy is not None:
        entropy = reduce(tokens.entropy)
        metrics["entropy_loss"] = entropy
        loss = loss - settings.entropy_coef * entropy
    elif settings.entropy_coef != 0:
        raise ValueError(f"--entropy-coef {settings.entropy_coef} needs the entropy of every token; none was computed.")
    metrics["pg_clipfrac"] = reduce(clipped)
    metrics["ppo_kl"] = reduce(ppo_kl)

    if tokens.rollout_log_probs is not None:
        trained = new if settings.use_rollout_logprobs else old
        metrics["train_rollout_logprob_abs_diff"] = reduce((trained - tokens.rollout_log_probs).abs())
    if settings.use_kl_loss:
        kl_loss = _kl_loss(tokens, old, settings, reduce)
        metrics["kl_loss"] = kl_loss
        loss = loss + settings.kl_loss_coef * kl_loss

    metrics = {"loss": loss, **metrics}
    return LossOutput(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})


def _old_log_probs(tokens: PolicyTokens, settings: AlgorithmArgs) -> Tokens:
    if settings.use_rollout_logprobs:
        if tokens.rollout_log_probs is None:
            raise ValueError("--use-rollout-logprobs: the batch has no rollout_log_probs; the engine must return them.")
        return tokens.rollout_log_probs
    return tokens.log_probs.detach() if tokens.old_log_probs is None else tokens.old_log_probs


def _kl_loss(tokens: PolicyTokens, old: Tokens, settings: AlgorithmArgs, reduce: Reducer) -> torch.Tensor:
    if tokens.ref_log_probs is None:
        raise ValueError("--use-kl-loss: the batch has no ref_log_probs; the reference model has not been run.")
    ratio = importance_ratio(tokens.log_probs, old) if settings.use_unbiased_kl else None
    return reduce(approx_kl(tokens.log_probs, tokens.ref_log_probs, settings.kl_loss_type, ratio))
