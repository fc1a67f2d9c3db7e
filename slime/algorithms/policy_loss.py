"""The policy loss of one micro-batch: surrogate, off-policy corrections, KL to a reference model, entropy bonus.

    new, old log-probs --> ratio --> surrogate --> OPSM --> TIS --> pg_loss --+
    entropy ------------------------------------------------- - entropy_coef -+--> loss
    new, reference log-probs --> KL estimate ------------------ + kl_loss_coef+

Called by the trainer's loss dispatch with flat per-token tensors, whatever model, batch layout and process groups are.
All tensors are ``[N]``, the response tokens of the micro-batch in sample order, whole on every rank. The last functions
are the ratio of GSPO and the surrogate of CISPO, whose other parts are those of GRPO, and the loss of fine-tuning.

Corrections are for tokens that another policy sampled: trainer and engine compute the same weights with different
kernels and precision, so samples are slightly off-policy even if the weights are current.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from slime.algorithms import find_estimator, formula
from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.reduce import LossOutput, Reducer, Samples

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


@dataclass(frozen=True)
class Correction:
    """The policy-gradient term after a correction.

    Attributes:
        pg_loss: ``[N]`` per token, with graph.
        loss_masks: masks to reduce with from here on, one ``[R_i]`` per sample. None: unchanged.
        metrics: name -> ``[N]`` per token, without graph.
    """

    pg_loss: torch.Tensor
    loss_masks: list[torch.Tensor] | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


Correct: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Correction]
"""(pg_loss, log-probs of the trainer, log-probs of the engine), each ``[N]``."""


def truncated_weights(
    pg_loss: torch.Tensor, train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, low: float, high: float
) -> Correction:
    """Truncated importance sampling: ``clip(w, low, high) * pg_loss`` with ``w = pi_trainer / pi_engine``.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; truncation
    goes back to Ionides 2008.

    Metrics: tis (w before truncation), tis_clipfrac, tis_abs (``|w - 1|``).
    """
    weight = _ratio(train_log_probs, rollout_log_probs)
    return _weighted(pg_loss, weight, weight.clamp(low, high))


def icepop(
    pg_loss: torch.Tensor, train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, low: float, high: float
) -> Correction:
    """Like :func:`truncated_weights`, but a token whose weight is outside ``[low, high]`` is dropped.

    Source: IcePop, Ring-1T report, arXiv:2510.18855.
    """
    weight = _ratio(train_log_probs, rollout_log_probs)
    is_inside = (weight >= low) & (weight <= high)
    # weight 0 instead of a mask: the token still counts in the denominator
    return _weighted(pg_loss, weight, torch.where(is_inside, weight, 0.0))


def drifted_tokens(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, samples: Samples, delta: float
) -> torch.Tensor:
    """Off-policy sequence masking: 1.0 at tokens to drop, ``[N]``.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1: a sequence whose mean ``log(pi_old / pi_new)`` exceeds
    ``delta`` gives no gradient if its advantage is negative.
    """
    # the mean of the whole sample at each of its tokens: a sequence is dropped as a whole
    drift = samples.spread(samples.means((old_log_probs - log_probs).detach()))
    return ((advantages < 0) & (drift > delta)).to(log_probs.dtype)


def _ratio(train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor) -> torch.Tensor:
    # constants: with a graph the weight would add a second gradient to the policy term
    return torch.exp(train_log_probs.detach().float() - rollout_log_probs.detach().float())


def _weighted(pg_loss: torch.Tensor, weight: torch.Tensor, used: torch.Tensor) -> Correction:
    metrics = {"tis": weight, "tis_clipfrac": (used != weight).to(weight.dtype), "tis_abs": (weight - 1).abs()}
    return Correction(pg_loss * used, None, metrics)


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
