"""Custom generation on one machine without a GPU, in about a minute: a guessing game of two turns.

    python examples/custom_generate/run_tiny.py --output outputs/custom_generate

1. "copy 47", and a model that has learned the game from a teacher who is wrong half of the time, and right after a
   hint.
2. GRPO with ``custom_generate.py``: a right first answer is worth twice as much as one after the hint.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.custom_generate.custom_generate import hint
from examples.tiny.copying import END, question, warm_started, write_questions
from examples.tiny.recipe import ROOT, ROWS_PER_ROLLOUT, learn, options, print_first_and_last
from slime.data.sample import Sample


def demonstrations(count: int) -> list[dict[str, Any]]:
    draw = random.Random(1)
    said = hint("0", Sample(status=Sample.Status.COMPLETED))
    rows = []
    for _ in range(count):
        number, other = draw.randrange(10, 100), draw.randrange(10, 100)
        right = [f"{number}{END}", 1]
        # The hint has mask 0, as in the game.
        segments = [right] if draw.random() < 0.5 else [[f"{other}{END}", 1], [said, 0], right]
        rows.append({"prompt": question(number), "metadata": {"segments": segments}})
    return rows


def main() -> None:
    output = options(__doc__, "custom_generate").output
    model = warm_started(output, words=("no",), rows=demonstrations(4 * ROWS_PER_ROLLOUT))
    data = write_questions(output / "train.jsonl", 256, seed=2)
    flags = [
        *("--apply-chat-template", "--rollout-max-response-len", 24, "--max-turns", 2),
        *("--custom-generate-function-path", f"{ROOT}/examples/custom_generate/custom_generate.py"),
    ]
    records = learn("GRPO with a game of two turns", model, data, flags, output, rollouts=8)
    print_first_and_last("reward of a game", records)


if __name__ == "__main__":
    main()
