"""A custom reward on one machine without a GPU, in about a minute.

    python examples/custom_reward/run_tiny.py --output outputs/custom_reward
    python examples/custom_reward/run_tiny.py --output outputs/custom_reward_group --form group

1. "copy 47", and a model that has learned it from a teacher who is wrong half of the time.
2. GRPO with ``custom_rm.py`` in one of its forms, and its filter: groups whose rewards are all equal are dropped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.copying import warm_started, write_questions
from examples.tiny.recipe import ROOT, learn, options, print_first_and_last

RM = f"{ROOT}/examples/custom_reward/custom_rm.py"
FORMS: dict[str, list[Any]] = {
    "function": ["--custom-rm-path", RM],
    "group": ["--custom-rm-path", RM, "--group-rm"],
    "class": ["--custom-rm-path", f"{RM}:CustomRewardModel"],
}


def main() -> None:
    chosen = options(__doc__, "custom_reward", form=tuple(FORMS))
    output: Path = chosen.output
    model, data = warm_started(output), write_questions(output / "train.jsonl", 256, seed=2)
    flags = [
        *("--apply-chat-template", "--rollout-max-response-len", 4, *FORMS[chosen.form]),
        # The filter drops groups: 24 prompts are sampled so that 16 usually remain.
        *("--dynamic-sampling-filter-path", f"{RM}:keep_mixed_groups", "--over-sampling-batch-size", 24),
    ]
    records = learn(f"GRPO with a custom reward: {chosen.form}", model, data, flags, output, rollouts=8)
    print_first_and_last("reward of the groups kept", records)


if __name__ == "__main__":
    main()
