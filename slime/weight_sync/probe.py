"""Proves that engines compute with the last sync: log-probs of fixed tokens, from trainer and engines.

``verify_canary`` is for engines that get weights, ``verify_adapter`` for those that serve an adapter.

A loaded adapter may still be an older one, have another scale, or not be used by requests. So after every sync each
engine scores the same tokens twice in one request, with the fields by which a run's requests name the adapter and
without them, and the trainer's log-probs with and without adapters must agree with both.

The base's difference measures the noise between the two implementations. In fp32 it is about 1e-6, and any fault
shows. In lower precision a young adapter's effect may be smaller than the noise. Then only this is visible: an engine
whose two answers are equal does not use the adapter.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from slime.backends import AdapterProof, Canary, EngineFleet, Probe
from slime.utils.errors import EngineError

_NUM_TOKENS = 16
# Ids of special tokens and of placeholders of images are usually at either end of a vocabulary.
_FIRST, _MOST = 4, 1000
_TOLERANCE = 1e-4
# Largest difference, in units of that of the base.
_NOISE_FACTOR = 4.0
# Cosine between two effects above which they differ by their size. Effects that are large are not linear in the scale.
_SAME_DIRECTION = 0.8


def probe_ids(vocab_size: int) -> list[int]:
    """The tokens of all probes of a run."""
    first = min(_FIRST, vocab_size - 1)
    size = min(vocab_size, _MOST) - first
    return [first + (7 * number * number + 3 * number) % size for number in range(_NUM_TOKENS)]


def verify_adapter(fleet: EngineFleet, proof: AdapterProof, timeout_s: float, before: Probe | None = None) -> None:
    """Ask every engine. They must serve.

    Args:
        before: the probe of the sync before, to recognize an engine that still has its adapter.

    Raises:
        EngineError: an engine lacks the adapter, does not use it, or computes with another one.
    """
    probe = proof.probe
    asking = fleet.start("probe", token_ids=list(probe.token_ids), fields=dict(proof.fields))
    for engine, answer in zip(fleet.engines, asking.wait(timeout_s), strict=True):
        problem = _problem(answer, probe, before)
        if problem is not None:
            raise EngineError(f"engine {engine.url}, weight version {probe.version}: {problem}")


def _problem(answer: Mapping[str, Any], probe: Probe, before: Probe | None) -> str | None:
    adapted, base = answer["adapted"], answer["base"]
    if adapted is None:
        return (
            "the adapter is missing. The engine has "
            f"{', '.join(answer['adapters']) or 'no adapter'}; it was unloaded, or never loaded."
        )
    noise = _distance(base, probe.base)
    allowed = max(_TOLERANCE, _NOISE_FACTOR * noise)
    difference = _distance(adapted, probe.adapted)
    effect = _distance(probe.adapted, probe.base)
    start = f"requests are not computed with the trainer's adapter (log-probs differ by up to {difference:.2g}): "
    if effect > 0 and difference > 0 and list(adapted) == list(base) and _is_visible(effect, noise):
        return start + "they are those of the base model, so requests do not use the adapter."
    if difference <= allowed:
        return None
    if before is not None and _distance(adapted, before.adapted) <= allowed:
        return start + f"they are those of version {before.version}, so the adapter is stale."
    ratio = _ratio(adapted, base, probe)
    if ratio is not None:
        return start + f"its effect is about {ratio:.2f} times the trainer's, so its scale is wrong."
    return start + f"the base model agrees to {noise:.2g}, so the adapter is another one."


def verify_canary(fleet: EngineFleet, canary: Canary, timeout_s: float, before: Canary | None = None) -> None:
    """Let every engine score the canary. They must serve.

    The median of the differences decides, because a near tie between experts may move single tokens.

    Args:
        before: that of the sync before, to recognize an engine that still computes with its weights.

    Raises:
        EngineError: an engine serves another version, starts from a stale cache, or computes other log-probs.
    """
    counts = [{"num_schedulers": engine.num_schedulers} for engine in fleet.engines]
    asking = fleet.start("canary", counts, token_ids=list(canary.token_ids))
    for engine, answers in zip(fleet.engines, asking.wait(timeout_s), strict=True):
        for number, answer in enumerate(answers):
            problem = _canary_problem(answer, canary, before)
            if problem is not None:
                where = f", scheduler {number} of {len(answers)}" if len(answers) > 1 else ""
                raise EngineError(
                    f"engine {engine.url}{where}, weight version {canary.version}: {problem} The sync is refused. "
                    "--weight-sync-proof none turns the canary off."
                )


def _canary_problem(answer: Mapping[str, Any], canary: Canary, before: Canary | None) -> str | None:
    if answer["version"] != canary.version:
        return f"the engine answers the canary with version {answer['version']}."
    # before the scores: stale keys and values of the first half would change them, too
    if answer["cached"]:
        return (
            f"{answer['cached']} tokens of the canary came from the prefix cache, which was not flushed after the "
            "sync: requests would continue from keys and values of older weights."
        )
    differences = [abs(a - b) for a, b in zip(answer["scores"], canary.scores, strict=True)]
    if statistics.median(differences) <= canary.tolerance:
        return None
    largest = max(range(len(differences)), key=differences.__getitem__)
    position = len(canary.token_ids) - len(differences) + largest
    text = (
        f"the canary's log-probs differ from the trainer's by {statistics.median(differences):.3g} (median, allowed "
        f"{canary.tolerance:g}) and at most {differences[largest]:.3g}, at token {position} "
        f"(id {canary.token_ids[position]}: engine {answer['scores'][largest]:.4f}, trainer "
        f"{canary.scores[largest]:.4f})."
    )
    if before is not None and _distance(answer["scores"], before.scores) <= canary.tolerance:
        return f"{text} They are those of version {before.version}."
    return text


def _is_visible(effect: float, noise: float) -> bool:
    """Whether log-probs of an engine that uses the adapter must differ from those of its base."""
    return effect > _TOLERANCE or effect > noise


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def _ratio(adapted: Sequence[float], base: Sequence[float], probe: Probe) -> float | None:
    """The engine's effect of the adapter over the trainer's, if they have one direction."""
    mine = [a - b for a, b in zip(probe.adapted, probe.base, strict=True)]
    theirs = [a - b for a, b in zip(adapted, base, strict=True)]
    square = sum(value * value for value in mine)
    other = sum(value * value for value in theirs)
    if not square or not other:
        return None
    product = sum(a * b for a, b in zip(mine, theirs, strict=True))
    return product / square if product > _SAME_DIRECTION * (square * other) ** 0.5 else None
