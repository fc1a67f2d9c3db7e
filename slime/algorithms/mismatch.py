"""Importance weights between trainer and engine at three levels, rejection, and metrics of their distance.

The long form of ``off_policy.truncated_weights``, for ``--custom-tis-function-path``: the function with that hook's
signature is in ``examples/train_infer_mismatch_helper``. Arguments are lists with one tensor per sample.

    rho_t = log pi_trainer - log pi_engine  --level-->  log ratio  --exp-->  ratio  --tis_mode-->  weight
                                                                             ratio  --rs bounds->  mask
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import torch

Level: TypeAlias = Literal["token", "sequence", "geometric"]
Ragged: TypeAlias = list[torch.Tensor]
_BOUND = 20.0  # of a log ratio: exp stays finite
_MODES = ("truncate", "clip", "mask")
_LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class MismatchSettings:
    """Keys of the YAML file of ``--custom-config-path``, with its names. All keys are required there.

    Attributes:
        use_tis: multiply the loss by the weights. False: only report.
        use_rs: reject tokens or sequences by the loss mask.
        tis_level, rs_level: ratio of a token, product over the sequence, or geometric mean over it.
        tis_mode: ``truncate`` min(w, upper), ``clip`` to [lower, upper], ``mask`` keep w and reject outside.
        tis_lower_bound: None means 1 / tis_upper_bound.
        rs_lower_bound, rs_upper_bound: None means the tis bound.
        rs_veto_threshold: a token ratio below it rejects the whole sequence. None switches that off.
        tis_batch_normalize: divide weights by their mean over the micro-batch. The result then depends on packing.
    """

    use_tis: bool
    use_rs: bool
    tis_level: Level
    rs_level: Level
    tis_mode: Literal["truncate", "clip", "mask"]
    tis_lower_bound: float | None
    tis_upper_bound: float
    rs_lower_bound: float | None
    rs_upper_bound: float | None
    rs_veto_threshold: float | None
    tis_batch_normalize: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MismatchSettings:
        """Read the values of these names.

        Raises:
            ValueError: missing keys, all of them in one message, or values that do not fit.
        """
        missing = [item.name for item in fields(cls) if item.name not in values]
        if missing:
            raise ValueError(f"--custom-config-path must set {', '.join(missing)} for the mismatch helper.")
        return cls(**{item.name: values[item.name] for item in fields(cls)})

    def __post_init__(self) -> None:
        if self.tis_level not in _LEVELS or self.rs_level not in _LEVELS or self.tis_mode not in _MODES:
            raise ValueError(
                f"tis_level {self.tis_level!r} and rs_level {self.rs_level!r} must be one of {_LEVELS}, "
                f"tis_mode {self.tis_mode!r} one of {_MODES}."
            )
        low, high = self.tis_bounds
        if self.tis_mode != "truncate" and low >= high:
            raise ValueError(f"tis_lower_bound {low} must be below tis_upper_bound {high}.")
        if self.use_rs and self.rs_bounds[0] >= self.rs_bounds[1]:
            raise ValueError(f"rs_lower_bound {self.rs_bounds[0]} must be below rs_upper_bound {self.rs_bounds[1]}.")
        if self.use_tis and self.tis_batch_normalize and self.tis_level == "geometric":
            raise ValueError("tis_batch_normalize has no meaning at tis_level geometric: use token or sequence.")

    @property
    def tis_bounds(self) -> tuple[float, float]:
        low = 1 / self.tis_upper_bound if self.tis_lower_bound is None else self.tis_lower_bound
        return low, self.tis_upper_bound

    @property
    def rs_bounds(self) -> tuple[float, float]:
        low, high = self.tis_bounds
        return (
            low if self.rs_lower_bound is None else self.rs_lower_bound,
            high if self.rs_upper_bound is None else self.rs_upper_bound,
        )


@torch.no_grad()
def compute_mis_weights(
    args: Any,
    *,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> tuple[Ragged | None, Ragged, dict[str, Ragged]]:
    """Weights, masks and metrics. Every list has one ``[R_i]`` per sample.

    Source: "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", Liu, Li et al.
    2025, for the levels, truncation, masking and the veto.

    Args:
        args: anything with the attributes of :class:`MismatchSettings`.

    Returns:
        (weights or None without ``use_tis``, masks after rejection, metrics: token values, a sequence's value at all
        of its tokens).
    """
    s = args if isinstance(args, MismatchSettings) else MismatchSettings.of(vars(args))
    masks = [mask.float() for mask in loss_masks]
    rho = [(a.float() - b.to(a.device).float()) for a, b in zip(train_log_probs, rollout_log_probs, strict=True)]
    metrics = _distances(list(train_log_probs), list(rollout_log_probs), rho, masks)
    weights: Ragged | None = None
    if s.use_tis:
        weights, masks = _bounded(s, _ratios(rho, [m.float() for m in loss_masks], s.tis_level), masks, metrics)
    if s.use_rs:
        # original masks: ratios of a sequence must not depend on tokens that tis_mode has rejected
        masks = _rejected(s, rho, [m.float() for m in loss_masks], masks, metrics)
    if weights is not None:
        weights = _normalised(s, weights, masks, metrics)
    kept = [new.to(old.dtype) for new, old in zip(masks, loss_masks, strict=True)]
    return weights, kept, metrics


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # where, not a product: inf * 0 is nan
    return torch.where(mask != 0, values, 0.0).sum() / mask.sum().clamp(min=1.0)


def _ratios(rho: Ragged, masks: Ragged, level: Level) -> Ragged:
    """``exp`` of the log ratio at ``level``, at every token."""
    out = []
    for row, mask in zip(rho, masks, strict=True):
        match level:
            case "token":
                log_ratio = row
            case "sequence":
                log_ratio = torch.where(mask != 0, row, 0.0).sum().expand_as(row)
            case "geometric":
                log_ratio = _mean(row, mask).expand_as(row)
            case other:
                raise ValueError(f"level {other!r}")
        out.append(torch.exp(log_ratio.clamp(-_BOUND, _BOUND)))
    return out


def _bounded(s: MismatchSettings, ratios: Ragged, masks: Ragged, metrics: dict[str, Ragged]) -> tuple[Ragged, Ragged]:
    """Apply ``tis_mode``: (weights, masks)."""
    low, high = s.tis_bounds
    metrics["tis_weight_before_bound"] = ratios
    too_low, too_high = ([r < low for r in ratios], [r > high for r in ratios])
    match s.tis_mode:
        case "truncate":
            weights = [r.clamp(max=high) for r in ratios]
            metrics["tis_truncate_fraction"] = [x.float() for x in too_high]
        case "clip":
            weights = [r.clamp(low, high) for r in ratios]
            metrics["tis_clip_fraction_low"] = [x.float() for x in too_low]
            metrics["tis_clip_fraction_high"] = [x.float() for x in too_high]
        case "mask":
            weights = ratios
            outside = zip(masks, too_low, too_high, strict=True)
            masks = [torch.where(a | b, 0.0, mask) for mask, a, b in outside]
            metrics["tis_mask_fraction_low"] = [x.float() for x in too_low]
            metrics["tis_mask_fraction_high"] = [x.float() for x in too_high]
        case other:
            raise ValueError(f"tis_mode {other!r}")
    weights = [weight * mask for weight, mask in zip(weights, masks, strict=True)]
    metrics["tis_weight_after_bound"] = weights
    return weights, masks


def _rejected(s: MismatchSettings, rho: Ragged, original: Ragged, masks: Ragged, metrics: dict[str, Ragged]) -> Ragged:
    """Masks without the tokens and sequences that are too far from the engine."""
    low, high = s.rs_bounds
    ratios = _ratios(rho, original, s.rs_level)
    metrics["rs_mask_fraction_low"] = [(r < low).float() for r in ratios]
    metrics["rs_mask_fraction_high"] = [(r > high).float() for r in ratios]
    # at the level of sequences all tokens of one have the same ratio, so it is rejected as a whole
    kept = [torch.where((r < low) | (r > high), 0.0, m) for r, m in zip(ratios, masks, strict=True)]
    if s.rs_veto_threshold is None:
        return kept
    # compared as logs: exp of a very small ratio would underflow to 0
    threshold = math.log(s.rs_veto_threshold)
    vetoes = [(row < threshold) & (mask != 0) for row, mask in zip(rho, original, strict=True)]
    metrics["rs_catastrophic_token_fraction"] = [veto.float() for veto in vetoes]
    metrics["rs_catastrophic_seq_fraction"] = [veto.any().float().expand_as(veto) for veto in vetoes]
    return [torch.zeros_like(mask) if bool(veto.any()) else mask for mask, veto in zip(kept, vetoes, strict=True)]


def _normalised(s: MismatchSettings, weights: Ragged, masks: Ragged, metrics: dict[str, Ragged]) -> Ragged:
    """Divide by the mean weight on request, and report the final weights."""
    metrics["is_ratio_mean_after_tis_rs"] = [w * m for w, m in zip(weights, masks, strict=True)]
    if s.tis_batch_normalize:
        if s.tis_level == "token":
            count = sum(float(mask.sum()) for mask in masks)
            total = sum(float((w * m).sum()) for w, m in zip(weights, masks, strict=True))
        else:
            # each sequence counts once, however long it is
            alive = [(w, m) for w, m in zip(weights, masks, strict=True) if m.sum() > 0]
            count, total = float(len(alive)), sum(float(_mean(w, m)) for w, m in alive)
        factor = total / count if count else 0.0
        # if everything was rejected there is nothing to divide by
        weights = [w / factor for w in weights] if factor > 1e-8 else weights
        metrics["batch_norm_factor"] = [torch.full_like(w, factor) for w in weights]
    final = [w * m for w, m in zip(weights, masks, strict=True)]
    metrics["is_ratio_mean_final"] = final
    for name, pick in (("min", torch.min), ("max", torch.max)):
        metrics[f"is_ratio_{name}_final"] = [
            (pick(w[m != 0]) if bool((m != 0).any()) else w.new_zeros(())).expand_as(w)
            for w, m in zip(weights, masks, strict=True)
        ]
    return weights


def _distances(train: Ragged, engine: Ragged, rho: Ragged, masks: Ragged) -> dict[str, Ragged]:
    """Perplexities and divergences between trainer and engine."""
    columns: dict[str, Ragged] = {}

    def add(name: str, value: torch.Tensor, like: torch.Tensor) -> None:
        columns.setdefault(name, []).append(value.expand_as(like))

    for a, b, row, mask in zip(train, engine, rho, masks, strict=True):
        train_log_ppl, engine_log_ppl = -_mean(a.float(), mask), -_mean(b.to(a.device).float(), mask)
        gap = train_log_ppl - engine_log_ppl
        bounded = row.clamp(-_BOUND, _BOUND)
        total = torch.where(mask != 0, row, 0.0).sum().clamp(-_BOUND, _BOUND)
        add("training_log_ppl", train_log_ppl, row)
        add("training_ppl", train_log_ppl.exp(), row)
        add("rollout_log_ppl", engine_log_ppl, row)
        add("rollout_ppl", engine_log_ppl.exp(), row)
        # tokens are samples of the engine, so these estimate KL(engine || trainer)
        add("kl", -row, row)
        add("k3_kl", bounded.exp() - row - 1, row)
        add("log_ppl_diff", gap, row)
        add("log_ppl_abs_diff", gap.abs(), row)
        add("ppl_ratio", gap.exp(), row)
        add("chi2_token", _mean((2 * bounded).exp(), mask) - 1, row)
        add("chi2_seq", (2 * total).exp() - 1, row)
    return columns
