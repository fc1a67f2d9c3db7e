"""An external agent on one machine without a GPU, in about a minute and a half: it learns to use its tool.

    python examples/agent_tool/run_tiny.py --output outputs/agent_tool

1. Codes that only the program's tool knows, and a random model whose chat template writes tool calls.
2. A supervised warm start from a teacher who calls the tool four times in ten and guesses otherwise.
3. GRPO through ``agent.py``, rewarded for right answers: guessing disappears.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import (
    ROWS_PER_ROLLOUT,
    learn,
    options,
    print_first_and_last,
    warm_start,
    write_rows,
)
from examples.tiny.tools import NAMES, call, conversation, make_tool_model

WORDS = ("look_up", "name", "code", "of")
SHARE_OF_CALLS = 0.4


def question(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"code of {name}?"}]


def demonstrations(count: int) -> list[dict[str, Any]]:
    """Invented codes, so that the model learns to read them off and not to know them."""
    draw = random.Random(1)
    rows = []
    for _ in range(count):
        name, code, guess = draw.choice(NAMES), draw.randrange(10, 100), draw.randrange(10, 100)
        looked_up = [("assistant", call("look_up", name=name)), ("tool", str(code)), ("assistant", str(code))]
        guessed = [("assistant", str(guess))]
        rows.append(conversation(question(name), *(looked_up if draw.random() < SHARE_OF_CALLS else guessed)))
    return rows


def write_settings(output: Path) -> str:
    """Write facts, data and settings. Returns the path of the data."""
    draw = random.Random(0)
    facts = {name: str(draw.randrange(10, 100)) for name in NAMES}
    (output / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    command = [sys.executable, str(Path(__file__).with_name("agent.py")), str(output / "facts.json")]
    # Seconds. The timeout also covers the wait for an engine.
    settings = {"agent_command": command, "agent_processes": 4, "agent_timeout": 60.0, "agent_max_turns": 3}
    (output / "agent_tool.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    rows = ({"prompt": question(name), "label": code} for name, code in facts.items())
    return write_rows(output / "train.jsonl", rows)


def main() -> None:
    output = options(__doc__, "agent_tool").output
    data = write_settings(output)
    model = warm_start(make_tool_model(output, WORDS), demonstrations(4 * ROWS_PER_ROLLOUT), output, rollouts=4)
    flags = [
        *("--rollout-batch-size", 8, "--rollout-max-response-len", 24),
        *("--custom-generate-function-path", "examples.agent_tool.generate_with_agent.generate"),
        *("--custom-config-path", output / "agent_tool.yaml"),
    ]
    records = learn("GRPO through an external agent", model, data, flags, output, rollouts=8)
    print_first_and_last("reward of an answer", records)


if __name__ == "__main__":
    main()
