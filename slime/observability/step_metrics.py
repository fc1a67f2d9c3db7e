"""The cost of a step: seconds by phase, tokens and FLOPs per second, bytes of a weight sync.

Called by the loop once per rollout with all measurements.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

MISMATCH_BAND = 0.1
"""Mean |trainer - engine| log-prob of a healthy run in bfloat16 stays well below. See docs/debugging.md."""

_NAMES = {"sync": "update_weights"}


@dataclass(frozen=True)
class Work:
    """The work of a step.

    Attributes:
        num_tokens: prompt and response tokens that were trained on.
        forward_flops: floating-point operations of one forward pass over them.
        num_ranks: of the trainer.
        num_synced_bytes: weights sent to each engine.
        changed_share: changed bytes over all bytes, if the weights were sent as differences.
    """

    num_tokens: int = 0
    forward_flops: float = 0.0
    num_ranks: int = 0
    num_synced_bytes: int = 0
    changed_share: float | None = None


def perf_metrics(seconds: Mapping[str, float], work: Work) -> dict[str, float]:
    """``perf/<phase>_time`` in seconds, and the rates derived from them.

    Args:
        seconds: by phase. ``train_wait`` is the time from the end of one training to the begin of the next.
    """
    named = {_NAMES.get(name, name): value for name, value in seconds.items()}
    metrics = {f"{name}_time": value for name, value in named.items()}
    if "train" in named:
        step = named["train"] + named.get("train_wait", 0.0)
        metrics["step_time"] = step
        metrics["wait_time_ratio"] = named.get("train_wait", 0.0) / step if step else 0.0
    # a backward pass costs two forward passes
    for phase, passes in (("log_probs", 1), ("ref_log_probs", 1), ("teacher_log_probs", 1), ("actor_train", 3)):
        if named.get(phase) and work.forward_flops and work.num_ranks:
            metrics[f"{phase}_tflops"] = passes * work.forward_flops / work.num_ranks / 1e12 / named[phase]
    if named.get("actor_train") and work.num_tokens:
        metrics["actor_train_tok_per_s"] = work.num_tokens / named["actor_train"]
    if named.get("update_weights") and work.num_synced_bytes:
        metrics["update_weights_bytes"] = float(work.num_synced_bytes)
        metrics["update_weights_gb_per_s"] = work.num_synced_bytes / 1e9 / named["update_weights"]
        if work.changed_share is not None:
            # A delta sync sends files, so these bytes are the written ones.
            metrics["update_weights_wire_bytes"] = float(work.num_synced_bytes)
            metrics["update_weights_density"] = work.changed_share
    return {f"perf/{name}": value for name, value in metrics.items()}


def warn_if_mismatched(rollout_id: int, steps: Sequence[Mapping[str, float]], run: Path | None) -> None:
    """Warn if log-probs of trainer and engine differ, and name the command that finds the cause."""
    # Steps without the engine's log-probs have nothing to compare.
    worst = max((step.get("train_rollout_logprob_abs_diff", 0.0) for step in steps), default=0.0)
    if worst > MISMATCH_BAND:
        logger.warning(
            "rollout %d: log-probs of trainer and engine differ by %.3f on average, more than %.1f. "
            "`slime doctor mismatch %s --rollout %d` finds the cause.",
            rollout_id,
            worst,
            MISMATCH_BAND,
            run or "<run>",
            rollout_id,
        )
