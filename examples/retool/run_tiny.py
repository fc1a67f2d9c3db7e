"""ReTool on one machine without a GPU, in about a minute: a tiny model learns to calculate by program.

    python examples/retool/run_tiny.py --output outputs/retool

1. Products of two-digit numbers, which a model of this size cannot work out, and a random model.
2. A supervised warm start from a teacher who writes a program four times in ten and guesses otherwise.
3. GRPO with the sandbox, rewarded for right answers: guessing disappears.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import (
    ROWS_PER_ROLLOUT,
    learn,
    make_model,
    options,
    print_first_and_last,
    warm_start,
    write_rows,
)

WORDS = ("<code>", "</code>", "<interpreter>", "</interpreter>", "<answer>", "</answer>", "print")
SHARE_OF_PROGRAMS = 0.4
SMALLEST, LARGEST = 32, 99  # all products have four digits


def problems(count: int, seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(SMALLEST, LARGEST), draw.randint(SMALLEST, LARGEST)) for _ in range(count)]


def question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}*{b}="}]


def demonstrations(count: int) -> list[dict[str, Any]]:
    draw = random.Random(1)
    rows = []
    for a, b in problems(count, seed=2):
        if draw.random() < SHARE_OF_PROGRAMS:
            output = f"<interpreter>{a * b}</interpreter>"
            segments = [[f"<code>print({a}*{b})</code>", 1], [output, 0], [f"<answer>{a * b}</answer>", 1]]
        else:
            # Four digits, like every product: a guess cannot be told by its length.
            segments = [[f"<answer>{draw.randrange(1000, 10000)}</answer>", 1]]
        rows.append({"prompt": question(a, b), "metadata": {"segments": segments}})
    return rows


def main() -> None:
    output = options(__doc__, "retool").output
    rows = ({"prompt": question(a, b), "label": str(a * b)} for a, b in problems(256, seed=3))
    data = write_rows(output / "train.jsonl", rows)
    shutil.copy(Path(__file__).parent / "retool.yaml", output)
    model = warm_start(make_model(output, WORDS), demonstrations(4 * ROWS_PER_ROLLOUT), output, rollouts=4)
    flags = [
        *("--apply-chat-template", "--rollout-max-response-len", 48),
        *("--max-turns", 2, "--custom-config-path", output / "retool.yaml"),
        *("--custom-generate-function-path", "examples.retool.generate_with_retool.generate"),
        *("--custom-rm-path", "examples.retool.generate_with_retool.reward_func", "--reward-key", "score"),
    ]
    records = learn("GRPO with a Python sandbox", model, data, flags, output, rollouts=10)
    print_first_and_last("reward of a response", records)


if __name__ == "__main__":
    main()
