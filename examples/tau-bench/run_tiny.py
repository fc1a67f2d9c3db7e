"""A shop's agent on one machine without a GPU: it learns to ask before it acts.

    python examples/tau-bench/run_tiny.py --output outputs/tau-bench

1. ``tiny_retail.py``, a shop with a user who follows a script, and a random model.
2. A supervised warm start from a teacher who asks which order is meant four times in ten and guesses otherwise.
3. GRPO, rewarded when the right order is cancelled: guessing disappears.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import ROWS_PER_ROLLOUT, learn, options, print_first_and_last, warm_start, write_rows
from examples.tiny.tools import NAMES, call, conversation, make_tool_model

SHOP = "examples.tau-bench.tiny_retail"
SHARE_OF_QUESTIONS = 0.4
WORDS = ("which?", "done", "cancel", "my", "order", "shop", "name")


def demonstrations(count: int) -> Iterator[dict[str, Any]]:
    shop = importlib.import_module(SHOP)
    prompt = [{"role": "system", "content": shop.WIKI}, {"role": "user", "content": shop.WISH}]
    draw = random.Random(1)
    for _ in range(count):
        name = draw.choice(NAMES)
        asked = [("assistant", shop.ASK), ("user", name)] if draw.random() < SHARE_OF_QUESTIONS else []
        cancelled = ("assistant", call("cancel", name=name)), ("tool", "ok")
        yield conversation(prompt, *asked, *cancelled, ("assistant", shop.DONE))


def main() -> None:
    output = options(__doc__, "tau-bench").output
    # The prompt is the number of the task. The environment has the text.
    rows = ({"prompt": str(index), "label": name} for index, name in enumerate(NAMES))
    data = write_rows(output / "train.jsonl", rows)
    (output / "tau.yaml").write_text(yaml.safe_dump({"tau_env": SHOP}), encoding="utf-8")
    model = make_tool_model(output, WORDS)
    model = warm_start(model, demonstrations(4 * ROWS_PER_ROLLOUT), output, rollouts=4)
    flags = [
        *("--rollout-batch-size", 8, "--rollout-max-response-len", 64, "--max-turns", 6),
        *("--custom-generate-function-path", "examples.tau-bench.generate_with_tau.generate"),
        *("--custom-config-path", output / "tau.yaml"),
    ]
    records = learn("GRPO between a user and tools", model, data, flags, output, rollouts=8)
    print_first_and_last("share of wishes fulfilled", records)


if __name__ == "__main__":
    main()
