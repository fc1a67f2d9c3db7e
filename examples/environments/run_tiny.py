"""Three environments in one run, on one machine without a GPU: sums of two packages, and a tool of an MCP server.

    python examples/environments/run_tiny.py --output outputs/environments

1. Rows of a reasoning-gym generator, of a verifiers environment and of an MCP server, in one file.
2. A supervised warm start from a teacher who answers, or calls the tool, four times in ten and guesses otherwise.
3. GRPO: each row's reward comes from its environment, and guessing becomes rare.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import ROWS_PER_ROLLOUT, learn, options, print_first_and_last, warm_start, write_rows
from examples.tiny.tools import NAMES, call, conversation, make_tool_model
from slime.environments.rollout import rows

SHARE_OF_RIGHT_ANSWERS = 0.4
TASKS = 64
WORDS = ("look_up", "name", "code", "of", "State the final answer to the following arithmetic problem:")
SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "system_prompt": "", "size": TASKS}


def environments(output: Path) -> list[tuple[str, dict[str, Any]]]:
    """(name, options) of the three, with the files of the MCP server."""
    draw = random.Random(0)
    codes = {name: str(draw.randrange(10, 100)) for name in NAMES}
    (output / "codes.json").write_text(json.dumps(codes), encoding="utf-8")
    questions = write_rows(
        output / "codes.jsonl", ({"prompt": f"code of {n}?", "label": code} for n, code in codes.items())
    )
    server = [sys.executable, str(Path(__file__).with_name("codes_server.py")), str(output / "codes.json")]
    return [
        ("reasoning-gym:chain_sum", SUMS),
        ("verifiers:examples.environments.tiny_sums", {"count": TASKS}),
        (f"mcp:{questions}", {"command": server}),
    ]


def demonstrations(tasks: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """Right answers to sums, and codes that are invented, so that the model learns to read them off."""
    draw = random.Random(1)
    for row in itertools.islice(itertools.cycle(tasks), count):
        is_right, guess = draw.random() < SHARE_OF_RIGHT_ANSWERS, str(draw.randrange(10, 100))
        text = row["prompt"][-1]["content"]
        if not text.startswith("code of "):
            yield conversation(row["prompt"], ("assistant", row["label"] if is_right else guess))
        elif is_right:
            asked = ("assistant", call("look_up", name=text[len("code of ") : -1]))
            yield conversation(row["prompt"], asked, ("tool", guess), ("assistant", guess))
        else:
            yield conversation(row["prompt"], ("assistant", guess))


def main() -> None:
    output = options(__doc__, "environments").output
    tasks = [row for name, settings in environments(output) for row in rows(name, settings)]
    data = write_rows(output / "train.jsonl", tasks)
    model = make_tool_model(output, WORDS)
    model = warm_start(model, demonstrations(tasks, 4 * ROWS_PER_ROLLOUT), output, rollouts=4)
    flags = [
        *("--rollout-batch-size", 8, "--rollout-max-response-len", 24),
        *("--custom-generate-function-path", "slime.environments.rollout.generate"),
    ]
    records = learn("GRPO in three environments", model, data, flags, output, rollouts=8)
    print_first_and_last("reward of an episode", records)


if __name__ == "__main__":
    main()
