"""The data of the task, and a tiny model for a machine without GPUs.

    python data.py

The question is three digits, the answer is the largest one. ``train.jsonl`` and ``eval.jsonl`` share no question.
``warm_start.jsonl`` has solved conversations of a teacher who often writes the first digit at first. A model that
imitates the teacher is often wrong, and training with the reward removes these errors.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.new.tiny_model import ModelShape, make_tiny_model

FOLDER = Path(__file__).parent / "data"
NUM_EVAL = 128
NUM_SOLVED = 4800
SHARE_RIGHT = 0.3


def question(digits: tuple[int, ...]) -> dict[str, Any]:
    """A row: a chat with one message, and the right answer."""
    return {"prompt": [{"role": "user", "content": " ".join(map(str, digits))}], "label": str(max(digits))}


def solved(digits: tuple[int, ...], draw: random.Random) -> dict[str, Any]:
    """A row of the warm start: after a wrong answer the user says no, and the second answer is right."""
    row = question(digits)
    first = row["label"] if draw.random() < SHARE_RIGHT else str(digits[0])
    row["prompt"].append({"role": "assistant", "content": first})
    if first != row["label"]:
        row["prompt"] += [{"role": "user", "content": "no"}, {"role": "assistant", "content": row["label"]}]
    return row


def write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path = FOLDER) -> None:
    draw = random.Random(0)
    questions = list(itertools.product(range(10), repeat=3))
    draw.shuffle(questions)
    folder.mkdir(exist_ok=True)
    write(folder / "eval.jsonl", map(question, questions[:NUM_EVAL]))
    write(folder / "train.jsonl", map(question, questions[NUM_EVAL:]))
    write(folder / "warm_start.jsonl", (solved(draw.choice(questions[NUM_EVAL:]), draw) for _ in range(NUM_SOLVED)))
    make_tiny_model(folder / "model", shape=ModelShape(num_layers=2, ffn_hidden_size=256, init_std=0.1))


if __name__ == "__main__":
    main()
