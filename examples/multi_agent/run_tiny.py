"""A team of agents on one machine without a GPU, in about a minute.

    python examples/multi_agent/run_tiny.py --output outputs/multi_agent

1. Problems ("repeat mint") and a random model.
2. A supervised warm start that teaches the three roles. The teacher gives up half of the time.
3. GRPO over the team's samples: giving up disappears.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import yaml

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

NAMES = ("amber", "basil", "cedar", "dahlia", "fennel", "hazel", "iris", "kelp", "laurel", "mint", "olive", "rose")
WORDS = (*NAMES, "repeat", "pass", "solve", "improve", "select")
SETTINGS = {
    "multi_agent_num_parallel": 2,
    "multi_agent_right_team_weight": 1.2,
    "multi_agent_wrong_team_weight": 0.8,
    "multi_agent_solver": "solve {problem}",
    "multi_agent_rewriter": "improve {problem}\n{solutions}",
    "multi_agent_selector": "select {problem}\n{solutions}",
}


def problem(draw: random.Random) -> tuple[str, str, str]:
    """Text, right answer, wrong answer."""
    name = draw.choice(NAMES)
    return f"repeat {name}", name, "pass"


def demonstrations(count: int) -> list[dict[str, Any]]:
    """The roles in turn. Half of the answers are wrong, so that there is something to learn."""
    draw = random.Random(1)
    rows = []
    for number in range(count):
        role = ("solver", "rewriter", "selector")[number % 3]
        text, *answers = problem(draw)
        solutions = "\n".join(f"{i}: {draw.choice(answers)}" for i in (1, 2))
        content = SETTINGS[f"multi_agent_{role}"].format(problem=text, solutions=solutions)  # type: ignore[attr-defined]
        answer = str(draw.choice((1, 2))) if role == "selector" else draw.choice(answers)
        prompt = [{"role": "user", "content": content}]
        rows.append({"prompt": prompt, "metadata": {"segments": [[f"{answer}<|im_end|>", 1]]}})
    return rows


def main() -> None:
    output = options(__doc__, "multi_agent").output
    draw = random.Random(2)
    rows = [
        {"prompt": [{"role": "user", "content": text}], "label": right}
        for text, right, _ in (problem(draw) for _ in range(256))
    ]
    data = write_rows(output / "train.jsonl", rows)
    (output / "multi_agent.yaml").write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
    model = warm_start(make_model(output, WORDS), demonstrations(4 * ROWS_PER_ROLLOUT), output, rollouts=4)
    flags = [
        # Agents read each other's text, which must not contain the end mark.
        *("--rollout-max-response-len", 6, "--rollout-skip-special-tokens", "--rm-type", "f1"),
        *("--custom-config-path", output / "multi_agent.yaml", "--custom-generate-function-path"),
        "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents",
    ]
    records = learn("GRPO of a team", model, data, flags, output, rollouts=10)
    print_first_and_last("reward of an agent", records)


if __name__ == "__main__":
    main()
