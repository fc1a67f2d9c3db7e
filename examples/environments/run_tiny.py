"""Four environments in one run, on one machine without a GPU: sums of two packages, a tool of an MCP server, and
counting in turns with an OpenEnv server.

    python examples/environments/run_tiny.py --output outputs/environments

1. Rows of a reasoning-gym generator, of a verifiers environment, of an MCP and of an OpenEnv server, in one file.
2. A supervised warm start from a teacher who answers, or calls the tool, four times in ten and guesses otherwise.
3. GRPO: each row's reward comes from its environment, and guessing becomes rare.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import ROWS_PER_ROLLOUT, learn, options, print_first_and_last, warm_start, write_rows
from examples.tiny.tools import NAMES, call, conversation, make_tool_model
from slime.environments.rollout import rows
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.net import free_port

SHARE_OF_RIGHT_ANSWERS = 0.4
TASKS = 64
COUNTS = 24
WORDS = (
    "look_up",
    "name",
    "code",
    "of",
    "count",
    "from",
    "next",
    "State the final answer to the following arithmetic problem:",
)
SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "system_prompt": "", "size": TASKS}


HERE = Path(__file__).parent


@contextmanager
def environments(output: Path) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """(name, options) of the four, while the OpenEnv server runs. Episodes start the MCP server."""
    draw = random.Random(0)
    codes = {name: str(draw.randrange(10, 100)) for name in NAMES}
    (output / "codes.json").write_text(json.dumps(codes), encoding="utf-8")
    questions = write_rows(
        output / "codes.jsonl", ({"prompt": f"code of {n}?", "label": code} for n, code in codes.items())
    )
    server = [sys.executable, str(HERE / "codes_server.py"), str(output / "codes.json")]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    counting = {"action": "text", "observation": "text", "answer": "answers", "size": COUNTS}
    with subprocess.Popen([sys.executable, str(HERE / "counting_server.py"), str(port)]) as process:
        try:
            wait_until(lambda: _answers(url), Deadline(120.0, "counting_server.py", "the limit in run_tiny.py"))
            yield [
                ("reasoning-gym:chain_sum", SUMS),
                ("verifiers:examples.environments.tiny_sums", {"count": TASKS}),
                (f"mcp:{questions}", {"command": server}),
                (f"openenv:{url}", counting),
            ]
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.HTTPError:  # it starts
        return False


def demonstrations(tasks: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """Right answers to sums, and codes that are invented, so that the model learns to read them off."""
    draw = random.Random(1)
    for row in itertools.islice(itertools.cycle(tasks), count):
        is_right, guess = draw.random() < SHARE_OF_RIGHT_ANSWERS, str(draw.randrange(10, 100))
        text = row["prompt"][-1]["content"]
        if text.startswith("count from ") and is_right:
            first = int(text.rpartition(" ")[2])
            turns = ("assistant", str(first + 1)), ("user", "next"), ("assistant", str(first + 2))
            yield conversation(row["prompt"], *turns)
        elif not text.startswith("code of "):
            yield conversation(row["prompt"], ("assistant", row["label"] if is_right else guess))
        elif is_right:
            asked = ("assistant", call("look_up", name=text[len("code of ") : -1]))
            yield conversation(row["prompt"], asked, ("tool", guess), ("assistant", guess))
        else:
            yield conversation(row["prompt"], ("assistant", guess))


def main() -> None:
    output = options(__doc__, "environments").output
    with environments(output) as named:
        tasks = [row for name, settings in named for row in rows(name, settings)]
        data = write_rows(output / "train.jsonl", tasks)
        model = make_tool_model(output, WORDS)
        model = warm_start(model, demonstrations(tasks, 4 * ROWS_PER_ROLLOUT), output, rollouts=4)
        flags = [
            *("--rollout-batch-size", 8, "--rollout-max-response-len", 24),
            *("--custom-generate-function-path", "slime.environments.rollout.generate"),
        ]
        records = learn("GRPO in four environments", model, data, flags, output, rollouts=8)
    print_first_and_last("reward of an episode", records)


if __name__ == "__main__":
    main()
