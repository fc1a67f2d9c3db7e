"""An agent of the Strands SDK on one machine without a GPU: it learns to use its calculator.

    python examples/strands_sglang/run_tiny.py --output outputs/strands_sglang

1. Products, and a random model whose chat template writes tool calls.
2. A supervised warm start from a teacher who uses the calculator four times in ten and guesses otherwise.
3. GRPO through the SDK, or through the same loop without it if ``strands-agents`` is not installed.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import ROWS_PER_ROLLOUT, learn, options, print_first_and_last, warm_start, write_rows
from examples.tiny.tools import call, conversation, make_tool_model

SHARE_OF_CALLS = 0.4
WORDS = ("calculator", "expression")
SETTINGS = {"strands_system_prompt": "", "strands_max_turns": 3, "strands_seconds": 120.0}


def question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}*{b}="}]


def demonstrations(count: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(1)
    for _ in range(count):
        a, b = draw.randint(32, 99), draw.randint(32, 99)
        used = [("assistant", call("calculator", expression=f"{a}*{b}")), ("tool", str(a * b))]
        if draw.random() < SHARE_OF_CALLS:
            yield conversation(question(a, b), *used, ("assistant", str(a * b)))
        else:
            yield conversation(question(a, b), ("assistant", str(draw.randrange(1000, 10000))))


def main() -> None:
    output = options(__doc__, "strands_sglang").output
    agent = "strands" if importlib.util.find_spec("strands") else "plain"
    if agent == "plain":
        print("strands-agents is not installed (pip install strands-agents openai): the same loop runs without it")
    (output / "strands.yaml").write_text(yaml.safe_dump(SETTINGS | {"strands_agent": agent}), encoding="utf-8")
    draw = random.Random(2)
    # From 32 on all products have four digits, like the guesses above.
    numbers = [(draw.randint(32, 99), draw.randint(32, 99)) for _ in range(256)]
    data = write_rows(output / "train.jsonl", ({"prompt": question(a, b), "label": str(a * b)} for a, b in numbers))
    model = make_tool_model(output, WORDS)
    model = warm_start(model, demonstrations(4 * ROWS_PER_ROLLOUT), output, rollouts=4)
    flags = [
        *("--rollout-batch-size", 8, "--rollout-max-response-len", 32, "--custom-config-path", output / "strands.yaml"),
        *("--custom-generate-function-path", "examples.strands_sglang.generate_with_strands.generate"),
    ]
    print_first_and_last("reward of an answer", learn("GRPO through an agent", model, data, flags, output, rollouts=8))


if __name__ == "__main__":
    main()
