#!/usr/bin/env python3
"""Make a tiny language model and a task it can learn, without any download.

    python tools/make_tiny_task.py --output DIR [--seed 0] [--layers 4] [--init-std 0.02] [--words WORD ...]

The model is a randomly initialized Qwen3 of about a million parameters with a character-level tokenizer and a chat
template, in the files a Hugging Face checkpoint has. The task is the addition of two two-digit numbers, in three
disjoint sets: ``sft.jsonl`` (solved, for a supervised warm start), ``train.jsonl`` and ``eval.jsonl`` (question and
label). The same seed makes the same files, byte for byte.

The solutions of the warm start come from a sloppy teacher, who mostly forgets to carry (48 + 37 = 75). A model that
imitates it writes numbers and adds digits, but is wrong if there is a carry. Sometimes it still samples the right
answer, which reinforcement learning has to find and to prefer. So the accuracy after the warm start is a plateau, about
the share of problems without a carry, however long the warm start is.

The demo and the end-to-end tests call :func:`make_tiny_task`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.new.tiny_model import ModelShape, make_tiny_model

__all__ = ["ModelShape", "TinyTask", "make_tiny_task"]

SMALLEST, LARGEST = 10, 99


@dataclass(frozen=True)
class TinyTask:
    """Paths of the files, as strings for a command line."""

    model: str
    sft: str
    train: str
    eval: str


def make_tiny_task(
    output: str | Path,
    *,
    seed: int = 0,
    num_sft: int = 4000,
    num_eval: int = 256,
    forgotten_carries: float = 0.8,
    shape: ModelShape | None = None,
    words: Sequence[str] = (),
) -> TinyTask:
    """Write model and data below ``output``.

    Args:
        output: directory, made when missing. Files of an earlier call are replaced.
        seed: decides the weights and which problem is in which set.
        num_sft: solved problems for the warm start. With few hundred the model learns them by heart and cannot add.
        num_eval: held-out problems. All others, about 3,800 with the defaults, are for training.
        forgotten_carries: share of the solutions with a carry that forget it. 0 makes all of them right.
        shape: sizes of the model.
        words: more strings that are one token each, such as names and tags. Part of the text, not special tokens.

    Raises:
        ValueError: the sets do not fit into the problems there are.
    """
    output = Path(output)
    model = make_tiny_model(output / "model", seed=seed, shape=shape, words=words)
    sft, train, held_out = _split_problems(seed, num_sft, num_eval)
    paths = {name: output / f"{name}.jsonl" for name in ("sft", "train", "eval")}
    # Drawn for every solution, also for those without a carry, so that the order of the draws stays fixed.
    sloppy = random.Random(seed)
    _write_jsonl(paths["sft"], (_solved(a, b, forgets=sloppy.random() < forgotten_carries) for a, b in sft))
    _write_jsonl(paths["train"], (_asked(a, b) for a, b in train))
    _write_jsonl(paths["eval"], (_asked(a, b) for a, b in held_out))
    return TinyTask(model, str(paths["sft"]), str(paths["train"]), str(paths["eval"]))


def _split_problems(seed: int, num_sft: int, num_eval: int) -> tuple[list[tuple[int, int]], ...]:
    problems = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(SMALLEST, LARGEST + 1)]
    if num_sft < 1 or num_eval < 1 or num_sft + num_eval >= len(problems):
        raise ValueError(
            f"num_sft {num_sft} and num_eval {num_eval} must be positive and leave some of the {len(problems)} "
            "problems for training"
        )
    random.Random(seed).shuffle(problems)
    # The held-out problems come first: a larger warm start takes from the training set, never from them.
    return problems[num_eval : num_eval + num_sft], problems[num_eval + num_sft :], problems[:num_eval]


def _question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"{a}+{b}="}


def _asked(a: int, b: int) -> dict[str, Any]:
    return {"prompt": [_question(a, b)], "label": str(a + b)}


def _solved(a: int, b: int, *, forgets: bool) -> dict[str, Any]:
    carry = 10 if a % 10 + b % 10 >= 10 else 0
    # The label stays right also if the solution forgets the carry.
    messages = [_question(a, b), {"role": "assistant", "content": str(a + b - carry * forgets)}]
    return {"prompt": messages, "messages": messages, "label": str(a + b)}


def _write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="Directory to write to.")
    parser.add_argument("--seed", type=int, default=0, help="Same seed, same files.")
    parser.add_argument("--num-sft", type=int, default=4000, help="Solved problems for the warm start.")
    parser.add_argument("--num-eval", type=int, default=256, help="Held-out problems.")
    parser.add_argument("--layers", type=int, default=ModelShape.num_layers, help="Layers of the model.")
    parser.add_argument(
        "--init-std",
        type=float,
        default=ModelShape.init_std,
        help="Standard deviation of the random matrices. A task that copies its input is learned sooner with 0.1.",
    )
    parser.add_argument("--words", nargs="+", default=(), help="More strings that are one token each.")
    options = parser.parse_args()
    shape = ModelShape(num_layers=options.layers, init_std=options.init_std)
    sizes = {"seed": options.seed, "num_sft": options.num_sft, "num_eval": options.num_eval}
    try:
        task = make_tiny_task(options.output, **sizes, shape=shape, words=options.words)
    except ValueError as error:
        parser.error(str(error))
    for name, path in vars(task).items():
        print(f"{name:>6}  {path}")


if __name__ == "__main__":
    main()
