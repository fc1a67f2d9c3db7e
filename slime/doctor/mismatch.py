"""Diagnosis: why trainer and engine give the same tokens different log-probs. One cause, in one sentence.

    mask         trained tokens that no engine sampled
    tokens       the trainer saw other tokens than the engine: shifted, tokenized again, another beginning
    temperature  the engine's distribution is sharper or flatter
    top-p        the engine's distribution was cut and scaled up
    weights      one of the two held other weights
    routing      near ties between experts were decided differently
    precision    rounding

A referee, the same model in transformers, computes the correct log-probs. Each cause predicts a different deviation of
the engine from them, and the prediction that fits names the cause. Without a referee only the pattern of the
differences decides, which is less certain. Called by ``slime doctor mismatch``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from slime.doctor.mismatch_input import Opinion, Referee, Row

Cause = Literal["none", "mask", "tokens", "temperature", "top-p", "weights", "routing", "precision"]

# Mean |difference| in nats that counts as agreement.
_AGREE = 1e-3
# A prediction fits if it leaves less than this share of the difference.
_EXPLAINED = 0.25
_TEMPERATURES = tuple(round(0.3 + 0.05 * i, 2) for i in range(55))
_TOP_PS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
# Share of trained tokens with the filler: fewer may be sampled tokens with probability 1.
_FILLER_SHARE = 0.002
# Tokens on which both sides agree before they part, on average.
_LEAST_PREFIX = 2.0


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        sentence: cause, side and number, for a person.
        evidence: figures by name, in nats unless the name has another unit.
    """

    cause: Cause
    sentence: str
    evidence: dict[str, float] = field(default_factory=dict)


def diagnose(
    rows: Sequence[Row], referee: Referee | None, *, temperature: float = 1.0, other: Referee | None = None
) -> Verdict:
    """Find the cause.

    Args:
        rows: samples with the log-probs of both sides.
        referee: the weights that should have generated them; None if they are not available.
        temperature: ``--rollout-temperature``: the trainer's log-probs are at this temperature.
        other: weights that the engine may have held instead, such as those of an earlier rollout.
    """
    trainer, engine = _flat(rows, lambda row: row.trainer), _flat(rows, lambda row: row.engine)
    size = _mean(trainer - engine)
    evidence = {"mean |trainer - engine|": size, "mean trainer - engine": float((trainer - engine).mean())}
    if size < _AGREE:
        return Verdict("none", f"Trainer and engine agree: {size:.1e} nats per token on average.", evidence)
    found = _mask(rows) or _shift(rows)
    if found is None and referee is not None:
        found = _with_referee(rows, referee, other, temperature, evidence)
    if found is None:
        found = _prefix(rows, size) or _precision(trainer - engine) or _weights_by_elimination(rows, referee, size)
    return Verdict(found.cause, found.sentence, evidence | found.evidence)


# ---------------------------------------------------------------------------------------- without a referee


def _mask(rows: Sequence[Row]) -> Verdict | None:
    """An engine's log-prob of exactly 0 is the filler of tokens that it did not sample."""
    trainer, engine = _flat(rows, lambda row: row.trainer), _flat(rows, lambda row: row.engine)
    # A sampled token may have a log-prob near 0 too, but then the trainer agrees.
    filler = (engine == 0) & (trainer < -0.01)
    share = float(filler.float().mean())
    if share < _FILLER_SHARE:
        return None
    explained = float((trainer - engine)[filler].abs().sum() / (trainer - engine).abs().sum())
    if explained < 1 - _EXPLAINED:
        return None
    return Verdict(
        "mask",
        f"The loss mask covers tokens that no engine sampled: {share:.1%} of the trained tokens have the engine's "
        "filler log-prob 0, so text of tools or environments is trained on.",
        {"share of trained tokens with filler": share},
    )


def _shift(rows: Sequence[Row]) -> Verdict | None:
    """The engine's column fits the trainer's when it is moved by a few places."""
    base = _mean(_flat(rows, lambda row: row.trainer - row.engine))
    for places in (1, -1, 2, -2):
        moved = [
            (row.all_trainer.roll(places) - row.all_engine)[max(places, 0) : row.length + min(places, 0)]
            for row in rows
            # A shift shows only in longer responses.
            if row.length > 4
        ]
        if not moved:
            return None
        left = _mean(torch.cat(moved))
        if left < _EXPLAINED * base:
            return Verdict(
                "tokens",
                f"The tokens are shifted: the engine's log-probs fit the trainer's {abs(places)} position(s) "
                f"{'earlier' if places > 0 else 'later'}, so response and log-probs were put together wrongly.",
                {f"left after a shift by {places}": left},
            )
    return None


def _prefix(rows: Sequence[Row], size: float) -> Verdict | None:
    """Both agree up to some token of a response and never after it, so the contexts differ from there on."""
    # Larger than the rounding errors of tokens on which both agree.
    tolerance = max(_AGREE, size / 20)
    lengths = []
    for row in rows:
        apart = ((row.all_trainer - row.all_engine).abs() > tolerance).nonzero().flatten().tolist()
        if apart:
            after = (row.all_trainer - row.all_engine)[apart[0] :].abs() > tolerance
            lengths.append((apart[0], float(after.float().mean())))
    if not lengths or len(lengths) < len(rows) / 4:
        return None
    prefix = sum(first for first, _ in lengths) / len(lengths)
    lasting = sum(share for _, share in lengths) / len(lengths)
    begins_at_once = sum(first == 0 for first, _ in lengths) / len(lengths)
    if prefix < _LEAST_PREFIX or lasting < 0.5 or begins_at_once > 0.5:
        return None
    return Verdict(
        "tokens",
        f"The trainer saw other tokens than the engine: both agree on the first {prefix:.0f} tokens of a response on "
        "average and not after that, as when text is tokenized again or edited after generation.",
        {"tokens until they part": prefix, "share of tokens apart after that": lasting},
    )


def _precision(difference: torch.Tensor) -> Verdict | None:
    """Rounding errors are small and have no direction."""
    size, bias = _mean(difference), abs(float(difference.mean()))
    if size > 0.05 or bias > 0.5 * size:
        return None
    return Verdict(
        "precision",
        f"Only rounding: the difference of {size:.1e} nats has no direction, as between kernels of other precision "
        "(bfloat16 against float32, or another attention backend).",
        {"bias": bias},
    )


def _weights_by_elimination(rows: Sequence[Row], referee: Referee | None, size: float) -> Verdict:
    versions = sorted({version for row in rows for version in row.versions})
    held = f" (the samples have weight version {', '.join(versions)})" if versions else ""
    sure = "" if referee is None else ", and no other cause explains it"
    return Verdict(
        "weights",
        f"The engine held other weights than the trainer{held}: their log-probs differ by {size:.2f} nats from the "
        f"first token on{sure}. Look at the weight sync (--check-weight-update-equal).",
    )


# ------------------------------------------------------------------------------------------- with a referee


def _with_referee(
    rows: Sequence[Row], referee: Referee, other: Referee | None, temperature: float, evidence: dict[str, float]
) -> Verdict | None:
    opinions = [referee.opinion(row) for row in rows]
    expected = _expected(rows, opinions, partial(_plain, temperature))
    trainer, engine = _flat(rows, lambda row: row.trainer), _flat(rows, lambda row: row.engine)
    off_engine, off_trainer = _mean(engine - expected), _mean(trainer - expected)
    evidence |= {"engine - referee": off_engine, "trainer - referee": off_trainer}
    if off_trainer > 0.5 * off_engine:
        return _trainer_is_off(off_trainer, off_engine)
    # The model's own rounding is the scale of harmless differences.
    rounding = _rounding(rows, referee, expected, temperature)
    evidence["referee in bfloat16"] = rounding
    fits = [
        (_mean(engine - _expected(rows, opinions, predict)), name, verdict)
        for name, predict, verdict in _predictions(referee, other, temperature)
    ]
    left, name, verdict = min(fits, key=lambda fit: fit[0])
    evidence[f"left by {name}"] = left
    if left < _EXPLAINED * off_engine and off_engine > 2 * rounding:
        return verdict
    routing = _routing(rows, opinions, (engine - expected).abs())
    if routing is not None:
        return routing
    bias = abs(float((engine - expected).mean()))
    if off_engine < 4 * rounding and bias < 0.5 * off_engine:
        return Verdict(
            "precision",
            f"Only rounding: the engine is {off_engine:.1e} nats from the exact log-probs, without direction, and the "
            f"model itself in bfloat16 is {rounding:.1e} from them.",
        )
    return None


def _trainer_is_off(off_trainer: float, off_engine: float) -> Verdict | None:
    if off_engine > 0.5 * off_trainer:
        return None  # the referee has other weights than both: it cannot decide
    return Verdict(
        "weights",
        f"The trainer is the one that is off: {off_trainer:.2f} nats from the model's own log-probs, the engine "
        f"{off_engine:.1e}. Its weights, its temperature or its log-probs are not those of the checkpoint.",
    )


Prediction = Callable[[Row, Opinion], torch.Tensor]
"""(row, opinion) -> the engine's log-probs ``[R]`` if a cause were true."""


def _predictions(
    referee: Referee, other: Referee | None, temperature: float
) -> Iterator[tuple[str, Prediction, Verdict]]:
    """For each cause: its name, the engine's log-probs under it, and the verdict if they fit."""
    for value in _TEMPERATURES:
        if abs(value - temperature) > 0.01:
            sentence = (
                f"The engine's log-probs are those of temperature {value:g}, the trainer's of {temperature:g}: both "
                "must use --rollout-temperature."
            )
            yield f"temperature {value:g}", partial(_plain, value), Verdict("temperature", sentence)
    for share in _TOP_PS:
        sentence = (
            f"The engine's log-probs are those of a nucleus of top-p {share:g}, scaled up to 1; the trainer's are of "
            "the whole vocabulary. It follows --rollout-top-p by itself: look for a custom generate function that sets "
            "top_p, or that gives Sample.append_response_tokens no meta_info."
        )
        yield f"top-p {share:g}", partial(_nucleus, temperature, share), Verdict("top-p", sentence)
    for what, edit in (("without its first token", _without_first), ("with a doubled first token", _with_double)):
        sentence = f"The engine saw the prompt {what}: the beginning-of-text token is added on one side only."
        yield f"a prompt {what}", partial(_asked, referee, edit, temperature), Verdict("tokens", sentence)
    if other is not None:
        sentence = f"The engine held other weights: its log-probs are those of {other.checkpoint}."
        yield "other weights", partial(_asked, other, _unchanged, temperature), Verdict("weights", sentence)


def _plain(temperature: float, row: Row, opinion: Opinion) -> torch.Tensor:
    return opinion.log_probs(temperature)


def _nucleus(temperature: float, share: float, row: Row, opinion: Opinion) -> torch.Tensor:
    return opinion.nucleus(temperature, share)


def _asked(
    referee: Referee, edit: Callable[[Row], Row], temperature: float, row: Row, opinion: Opinion
) -> torch.Tensor:
    return referee.opinion(edit(row)).log_probs(temperature)


def _unchanged(row: Row) -> Row:
    return row


def _without_first(row: Row) -> Row:
    return row.with_prompt(row.tokens[1 : row.num_prompt])


def _with_double(row: Row) -> Row:
    return row.with_prompt([*row.tokens[:1], *row.tokens[: row.num_prompt]])


def _rounding(rows: Sequence[Row], referee: Referee, expected: torch.Tensor, temperature: float) -> float:
    rounded = referee.in_bfloat16()
    opinions = [rounded.opinion(row) for row in rows]
    return _mean(_expected(rows, opinions, partial(_plain, temperature)) - expected)


def _routing(rows: Sequence[Row], opinions: Sequence[Opinion], error: torch.Tensor) -> Verdict | None:
    """Few tokens are far off, and at those tokens two experts were nearly equal."""
    margins = [opinion.router_margin for opinion in opinions]
    if any(margin is None for margin in margins):
        return None
    margin = torch.cat([m[row.mask] for m, row in zip(margins, rows, strict=True) if m is not None])
    # The worst tenth of the tokens.
    worst = error >= error.quantile(0.9)
    ratio = float(margin[worst].median() / margin[~worst].median().clamp(min=1e-9))
    is_uneven = float(error.median()) < 0.5 * float(error[worst].median())
    if ratio > 0.6 or not is_uneven:
        return None
    return Verdict(
        "routing",
        "Engine and trainer chose other experts where two were nearly equal: the tokens that differ most have router "
        f"margins {ratio:.0%} as wide as the others. --use-rollout-routing-replay makes the trainer follow the engine.",
        {"router margin, worst tokens over others (ratio)": ratio},
    )


def _expected(rows: Sequence[Row], opinions: Sequence[Opinion], predict: Prediction) -> torch.Tensor:
    return torch.cat([predict(row, opinion)[row.mask] for row, opinion in zip(rows, opinions, strict=True)])


def _flat(rows: Sequence[Row], column: Callable[[Row], torch.Tensor]) -> torch.Tensor:
    return torch.cat([column(row) for row in rows])


def _mean(difference: torch.Tensor) -> float:
    return float(difference.abs().mean()) if difference.numel() else math.nan
