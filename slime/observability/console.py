"""One aligned line per rollout, for the person who watches the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["step_line"]

_PHASES = ("rollout", "train", "sync")


def step_line(
    rollout_id: int, metrics: Mapping[str, float], step: Mapping[str, float], seconds: Mapping[str, float]
) -> str:
    """The console line of one rollout.

    Args:
        rollout_id: its number.
        metrics: metrics of the rollout with their prefix (``rollout/raw_reward``).
        step: metrics of its last optimizer step without prefix (``loss``); empty when nothing was trained.
        seconds: seconds by phase: ``rollout``, ``train``, ``sync``; ``first_step`` once, after the first trained step.

    A value that the run does not have is shown as ``-``, so that the columns stay where they are.
    """
    reward = _first(metrics, "rollout/raw_reward", "rollout/rewards")
    length = _first(metrics, "rollout/response_len/mean", "rollout/response_lengths")
    cells = [
        f"rollout {rollout_id:>5}",
        f"reward {_fixed(reward, 3):>6}",
        f"len {_fixed(length, 1):>6}",
        f"loss {_fixed(step.get('loss'), 4):>8}",
        f"kl {_short(_first(step, 'kl_loss', 'ppo_kl')):>8}",
        f"logp diff {_short(step.get('train_rollout_logprob_abs_diff')):>7}",
        f"grad {_fixed(step.get('grad_norm'), 3):>7}",
        " ".join(f"{phase} {_fixed(seconds.get(phase), 1):>5}s" for phase in _PHASES),
    ]
    if "first_step" in seconds:
        cells.append(f"first step after {seconds['first_step']:.1f} s")
    return " | ".join(cells)


def _first(values: Mapping[str, float], *names: str) -> float | None:
    return next((values[name] for name in names if name in values), None)


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _short(value: float | None) -> str:
    """Small numbers whose order of magnitude matters: ``0``, ``nan``, ``-3.1e-07``."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else str(value)
