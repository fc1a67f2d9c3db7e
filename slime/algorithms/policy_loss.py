"""The policy loss of one micro-batch: surrogate, off-policy corrections, KL to a reference model, entropy bonus.

    new, old log-probs --> ratio --> surrogate --> OPSM --> TIS --> pg_loss --+
    entropy ------------------------------------------------- - entropy_coef -+--> loss
    new, reference log-probs --> KL estimate ------------------ + kl_loss_coef+

Called by the trainer's loss dispatch with flat per-token tensors, whatever model, batch layout and process groups are.
All tensors are ``[N]``, the response tokens of the micro-batch in sample order, whole on every rank. The last functions
are the ratio of GSPO and the surrogate of CISPO, whose other parts are those of GRPO, and the loss of fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.estimators import find_estimator, formula
from slime.algorithms.kl import approx_kl, importance_ratio
from slime.algorithms.off_policy import Correct, Correction, drifted_tokens, truncated_weights
from slime.algorithms.reduce import Reducer, Samples
from slime.algorithms.types import LossOutput

Tokens: TypeAlias = torch.Tensor
MakeReducer: TypeAlias = Callable[[Sequence[torch.Tensor]], Reducer]
"""Loss masks, one ``[R_i]`` per sample -> reducer."""


@dataclass(frozen=True)
class PolicyTokens:
    """The input of the loss for the response tokens, each ``[N]`` fp32.

    Attributes:
        log_probs: under the current weights, with graph.
        advantages: credit per token.
        entropy: of the current distribution, with graph only if it has a coefficient. None: not computed.
        old_log_probs: under the weights at the start of this rollout's training. None: the current weights still are
            those weights, the ratio is exactly 1.
        rollout_log_probs: as the engine reported them while sampling.
        ref_log_probs: under the reference model.
        opd_reverse_kl: divergence from the teacher that went into the advantages, for the report only.
    """

    log_probs: Tokens
    advantages: Tokens
    entropy: Tokens | None = None
    old_log_probs: Tokens | None = None
    rollout_log_probs: Tokens | None = None
    ref_log_probs: Tokens | None = None
    opd_reverse_kl: Tokens | None = None


def policy_loss(
    tokens: PolicyTokens,
    settings: AlgorithmArgs,
    samples: Samples,
    *,
    correct: Correct | None = None,
    make_pg_reducer: MakeReducer | None = None,
) -> LossOutput:
    """``loss = pg_loss - entropy_coef * entropy + kl_loss_coef * KL(policy || reference)``.

    Metrics, in this order each if it applies: loss, pg_loss, entropy_loss, pg_clipfrac, ppo_kl (reduced
    ``log pi_old - log pi_new``), train_rollout_logprob_abs_diff, kl_loss, ois (the ratio itself), those of the
    correction, opsm_clipfrac, opd_reverse_kl. Metrics of the gap between trainer and engine are reduced with the
    original masks, all others with those that the correction leaves.

    Args:
        correct: replaces :func:`truncated_weights` under ``use_tis``. Under ``get_mismatch_metrics`` alone only its
            metrics are used.
        make_pg_reducer: makes the reducer of the policy-gradient term.

    Raises:
        ValueError: log-probs that the settings need are missing.
    """
    new = tokens.log_probs
    old = _old_log_probs(tokens, settings)
    observe = samples.reducer()  # for metrics of the gap between trainer and engine
    estimator = find_estimator(settings.advantage_estimator)
    ppo_kl: Tokens = formula(estimator.log_ratio)(new, old, samples)
    per_token, clipped = formula(estimator.surrogate)(ppo_kl, new, tokens.advantages, settings)
    dropped = None
    if settings.use_opsm:
        dropped = drifted_tokens(new, old, tokens.advantages, samples, settings.opsm_delta)
        # a factor and not a mask: dropped tokens still count in the denominator
        per_token = per_token * (1 - dropped)
    correction = _correct(per_token, tokens, settings, correct)
    masks = samples.loss_masks if correction.loss_masks is None else correction.loss_masks
    # tokens that the correction rejects leave the sums, but denominators stay those of the original masks
    reduce = samples.reducer(masks)

    loss = pg_loss = (reduce if make_pg_reducer is None else make_pg_reducer(masks))(correction.pg_loss)
    metrics = {"pg_loss": pg_loss}
    if tokens.entropy is not None:
        entropy = reduce(tokens.entropy)
        # the entropy itself: the metric has neither coefficient nor sign
        metrics["entropy_loss"] = entropy
        loss = loss - settings.entropy_coef * entropy
    elif settings.entropy_coef != 0:
        raise ValueError(f"--entropy-coef {settings.entropy_coef} needs the entropy of every token; none was computed.")
    metrics["pg_clipfrac"] = reduce(clipped)
    metrics["ppo_kl"] = reduce(ppo_kl)
    if tokens.rollout_log_probs is not None:
        # with --use-rollout-logprobs old holds the engine's values: the difference would always be 0
        trained = new if settings.use_rollout_logprobs else old
        metrics["train_rollout_logprob_abs_diff"] = observe((trained - tokens.rollout_log_probs).abs())
    if settings.use_kl_loss:
        kl_loss = _kl_loss(tokens, old, settings, samples, reduce)
        metrics["kl_loss"] = kl_loss
        loss = loss + settings.kl_loss_coef * kl_loss
    if settings.use_tis or settings.get_mismatch_metrics:
        metrics["ois"] = observe(torch.exp(-ppo_kl))
        metrics |= {name: observe(values) for name, values in correction.metrics.items()}
    if dropped is not None:
        metrics["opsm_clipfrac"] = observe(dropped)
    if tokens.opd_reverse_kl is not None:
        metrics["opd_reverse_kl"] = observe(tokens.opd_reverse_kl)
    metrics = {"loss": loss, **metrics}
    return LossOutput(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})


def _old_log_probs(tokens: PolicyTokens, settings: AlgorithmArgs) -> Tokens:
    if settings.use_rollout_logprobs:
        return _engine_log_probs(tokens, "--use-rollout-logprobs")
    if settings.true_on_policy_mode or tokens.old_log_probs is None:
        return tokens.log_probs.detach()  # the ratio is exactly 1, but still has its gradient
    return tokens.old_log_probs


def _engine_log_probs(tokens: PolicyTokens, flag: str) -> Tokens:
    if tokens.rollout_log_probs is None:
        raise ValueError(f"{flag}: the batch has no rollout_log_probs; the engine must return them.")
    return tokens.rollout_log_probs


def _correct(per_token: Tokens, tokens: PolicyTokens, settings: AlgorithmArgs, correct: Correct | None) -> Correction:
    if not settings.use_tis and not settings.get_mismatch_metrics:
        return Correction(per_token)
    engine = _engine_log_probs(tokens, "--use-tis" if settings.use_tis else "--get-mismatch-metrics")
    trained = tokens.log_probs.detach() if tokens.old_log_probs is None else tokens.old_log_probs
    if correct is None:
        result = truncated_weights(per_token, trained, engine, settings.tis_clip_low, settings.tis_clip)
    else:
        result = correct(per_token, trained, engine)
    # --get-mismatch-metrics alone must not change the loss
    return result if settings.use_tis else Correction(per_token, None, result.metrics)


def _kl_loss(
    tokens: PolicyTokens, old: Tokens, settings: AlgorithmArgs, samples: Samples, reduce: Reducer
) -> torch.Tensor:
    if tokens.ref_log_probs is None:
        raise ValueError("--use-kl-loss: the batch has no ref_log_probs; the reference model has not been run.")
    new = tokens.log_probs
    at_rest = new.detach()  # in place of log-probs that are not trained: their ratio must not overflow
    reference = torch.where(samples.mask, tokens.ref_log_probs, at_rest)
    ratio = importance_ratio(new, torch.where(samples.mask, old, at_rest)) if settings.use_unbiased_kl else None
    return reduce(approx_kl(new, reference, settings.kl_loss_type, ratio))


def sequence_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, samples: Samples) -> torch.Tensor:
    """``log(1 / s_i)`` at every token of sample i, where ``s_i`` is the length-normalized sequence ratio.

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7: ``s_i = exp(1/|y_i| sum_t log(pi_new / pi_old))``. The
    mean runs over the trained tokens. Sign: old minus new, so ``s_i = exp(-result)``.

    Args:
        log_probs: ``[N]`` with graph: the gradient of each token contains every token of its sample.
        old_log_probs: ``[N]``.
        samples: where each sample begins and which of its tokens count.

    Returns:
        ``[N]`` fp32.
    """
    return samples.spread(samples.means(old_log_probs - log_probs))


def cispo_surrogate(
    log_ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, settings: AlgorithmArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`cispo_loss` with the bounds of the flags."""
    return cispo_loss(log_ratio, log_probs, advantages, *settings.clip_bounds)


def cispo_loss(
    ppo_kl: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``-stopgrad(clip(r, 1 - eps_clip, 1 + eps_clip_high)) * A * log pi`` per token, not reduced.

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5. The paper has no lower bound: ``--eps-clip`` of 1 or more.

    Args:
        ppo_kl: ``log pi_old - log pi_new`` per token, so the ratio is ``r = exp(-ppo_kl)``.
        log_probs: of the current policy, with graph.
        advantages: same shape.

    Returns:
        (loss per token, 1.0 for a clipped ratio), same shape as the input.
    """
    # a constant: the gradient comes from log_probs alone, so clipping never removes it
    ratio = torch.exp(-ppo_kl.detach())
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped * advantages * log_probs, (clipped != ratio).to(log_probs.dtype)


def sft_loss(log_probs: torch.Tensor, reduce: Reducer) -> LossOutput:
    """Supervised fine-tuning: ``loss = -reduce(log pi(token))``.

    Args:
        log_probs: ``[N]`` fp32, response tokens of the micro-batch in sample order.
        reduce: from :func:`slime.algorithms.reduce.make_reducer`.
    """
    loss = -reduce(log_probs)
    return LossOutput(loss=loss, metrics={"loss": loss.detach()})
