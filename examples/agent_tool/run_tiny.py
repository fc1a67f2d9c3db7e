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
    make_model,
    options,
    print_first_and_last,
    warm_start,
    write_rows,
)

NAMES = ("amber", "basil", "cedar", "dahlia", "fennel", "hazel", "iris", "kelp", "laurel", "mint", "olive", "rose")
CALL = (
    "<tool_call>",
    "<function=",
    "look_up",
    "<parameter=",
    "name",
    ">",
    "</parameter>",
    "</function>",
    "</tool_call>",
)
WORDS = (*CALL, *NAMES, "tool", "code", "of")
SHARE_OF_CALLS = 0.4
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call><function=' + call['function']['name'] + '>' }}"
    "{% for key, value in call['function']['arguments'].items() %}"
    "{{ '<parameter=' + key + '>' + value + '</parameter>' }}{% endfor %}{{ '</function></tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def question(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"code of {name}?"}]


def demonstrations(count: int) -> list[dict[str, Any]]:
    """Invented codes, so that the model learns to read them off and not to know them."""
    draw = random.Random(1)
    rows = []
    for _ in range(count):
        name, code, guess = draw.choice(NAMES), draw.randrange(10, 100), draw.randrange(10, 100)
        if draw.random() < SHARE_OF_CALLS:
            call = f"<tool_call><function=look_up><parameter=name>{name}</parameter></function></tool_call><|im_end|>"
            result = f"\n<|im_start|>tool\n{code}<|im_end|>\n<|im_start|>assistant\n"
            segments = [[call, 1], [result, 0], [f"{code}<|im_end|>", 1]]
        else:
            segments = [[f"{guess}<|im_end|>", 1]]
        rows.append({"prompt": question(name), "metadata": {"segments": segments}})
    return rows


def model_with_tools(output: Path) -> str:
    model = make_model(output, WORDS)
    config = Path(model) / "tokenizer_config.json"
    values = json.loads(config.read_text(encoding="utf-8")) | {"chat_template": CHAT_TEMPLATE}
    config.write_text(json.dumps(values), encoding="utf-8")
    return model


def write_settings(output: Path) -> str:
    """Facts, data and settings; returns the data's path."""
    draw = random.Random(0)
    facts = {name: str(draw.randrange(10, 100)) for name in NAMES}
    (output / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    command = [sys.executable, str(Path(__file__).with_name("agent.py")), str(output / "facts.json")]
    settings = {"agent_command": command, "agent_processes": 4, "agent_timeout": 60.0, "agent_max_turns": 3}
    (output / "agent_tool.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    rows = ({"prompt": question(name), "label": code} for name, code in facts.items())
    return write_rows(output / "train.jsonl", rows)


def main() -> None:
    output = options(__doc__, "agent_tool").output
    data = write_settings(output)
    model = warm_start(model_with_tools(output), demonstrations(4 * ROWS_PER_ROLLOUT), output, rollouts=4)
    flags = [
        *("--rollout-batch-size", 8, "--rollout-max-response-len", 24),
        *("--custom-generate-function-path", "examples.agent_tool.generate_with_agent.generate"),
        *("--custom-config-path", output / "agent_tool.yaml"),
    ]
    records = learn("GRPO through an external agent", model, data, flags, output, rollouts=8)
    print_first_and_last("reward of an answer", records)


if __name__ == "__main__":
    main()
