"""A coding agent on one machine without a GPU: it learns to write the file that it was asked for.

    python examples/coding_agent_rl/run_tiny.py --output outputs/coding_agent_rl

1. A repository whose test wants a number in ``answer.py``, and a random model whose chat template writes tool calls.
2. A supervised warm start from a teacher who writes some other number half of the time.
3. GRPO through ``mini_agent.py`` in temporary directories, rewarded by the test.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import ROWS_PER_ROLLOUT, learn, options, print_first_and_last, warm_start, write_rows
from examples.tiny.tools import call, conversation, make_tool_model

WORDS = ("write", "path", "text", "answer.py", "answer", "saved", "done")

SETTINGS = {
    **{"coding_harness": "mini", "coding_sandbox": "local", "coding_sandboxes": 4, "coding_time_budget": 60},
    **{"coding_eval_timeout": 60, "coding_max_turns": 3, "coding_adapter_host": "127.0.0.1"},
    "coding_adapter_url": None,
}


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"answer {number}"}]


def demonstrations(count: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(1)
    for _ in range(count):
        number, other = draw.randrange(10, 100), draw.randrange(10, 100)
        written = number if draw.random() < 0.5 else other
        edit = call("write", path="answer.py", text=f"answer = {written}")
        yield conversation(question(number), ("assistant", edit), ("tool", "saved"), ("assistant", "done"))


def make_repository(place: Path) -> str:
    place.mkdir()
    (place / "answer.py").write_text("answer = 0\n")
    # A commit fails on a machine whose git has no identity.
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "the task"]):
        subprocess.run([*git, *words], check=True)
    return str(place)


def main() -> None:
    output = options(__doc__, "coding_agent_rl").output
    (output / "coding_agent.yaml").write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
    # -S: the test needs no site packages, and Python starts faster without them.
    task = {"image": make_repository(output / "repository"), "workdir": ".", "eval_cmd": "python3 -S test.py"}
    rows = []
    for number in range(10, 100):
        test = {"test.py": f"from answer import answer\nassert answer == {number}\n"}
        # The test is not in the repository, so the agent cannot change it.
        rows.append({"prompt": question(number), "label": str(number), "metadata": task | {"eval_files": test}})
    data = write_rows(output / "train.jsonl", rows)
    model = warm_start(make_tool_model(output, WORDS), demonstrations(4 * ROWS_PER_ROLLOUT), output, rollouts=4)
    flags = [
        *("--rollout-batch-size", 8, "--rollout-max-response-len", 40, "--metadata-key", "metadata"),
        *("--custom-generate-function-path", "examples.coding_agent_rl.generate.generate"),
        *("--custom-config-path", output / "coding_agent.yaml"),
    ]
    print_first_and_last(
        "share of tests passed", learn("GRPO of a coding agent", model, data, flags, output, rollouts=6)
    )


if __name__ == "__main__":
    main()
