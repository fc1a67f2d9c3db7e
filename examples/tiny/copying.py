"""A simple task for offline runs whose subject is another feature: write the number of the question, "copy 47" -> 47.

A model of this size learns it in half a minute from a teacher who writes another number half of the time.
Reinforcement learning then removes these errors.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.tiny.recipe import ROWS_PER_ROLLOUT, make_model, warm_start, write_rows

__all__ = ["END", "WORDS", "demonstrations", "question", "warm_started", "write_questions"]

END = "<|im_end|>"
WORDS = ("copy",)
_WARM_START_ROLLOUTS = 3


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"copy {number}"}]


def write_questions(path: Path, count: int, *, seed: int) -> str:
    """A file of questions with labels. Returns its path."""
    draw = random.Random(seed)
    numbers = (draw.randrange(10, 100) for _ in range(count))
    return write_rows(path, ({"prompt": question(number), "label": str(number)} for number in numbers))


def demonstrations(count: int, share_right: float = 0.5) -> list[dict[str, Any]]:
    """Rows for :func:`warm_start`."""
    draw = random.Random(1)
    rows = []
    for _ in range(count):
        number, other = draw.randrange(10, 100), draw.randrange(10, 100)
        answer = number if draw.random() < share_right else other
        rows.append({"prompt": question(number), "metadata": {"segments": [[f"{answer}{END}", 1]]}})
    return rows


def warm_started(output: Path, *, words: Sequence[str] = (), rows: list[dict[str, Any]] | None = None) -> str:
    """A tiny model that copies, half of the time. Returns its directory.

    Args:
        words: further words that are one token each.
        rows: other demonstrations.
    """
    given = rows or demonstrations(_WARM_START_ROLLOUTS * ROWS_PER_ROLLOUT)
    return warm_start(make_model(output, (*WORDS, *words)), given, output, rollouts=len(given) // ROWS_PER_ROLLOUT)
