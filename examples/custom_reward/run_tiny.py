"""A reward of your own on one machine without a GPU, in about a minute.

    python examples/custom_reward/run_tiny.py --output outputs/custom_reward
    python examples/custom_reward/run_tiny.py --output outputs/custom_reward_group --form group

1. "copy 47", and a model that has learnt it from a teacher who is wrong half of the time.
2. GRPO with ``custom_rm.py`` in one of its forms, and its filter: groups whose rewards are all equal are dropped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.copying import warm_started, write_questions
from examples.tiny.recipe import GRPO, ROOT, options, read_metrics, run_train, series

RM = f"{ROOT}/examples/custom_reward/custom_rm.py"
FORMS: dict[str, list[Any]] = {
    "function": ["--custom-rm-path", RM],
    "group": ["--custom-rm-path", RM, "--group-rm"],
    "class": ["--custom-rm-path", f"{RM}:CustomRewardModel"],
}


def main() -> None:
    chosen = options(__doc__, "custom_reward", form=tuple(FORMS))
    output: Path = chosen.output
    flags = [
        *("--hf-checkpoint", warm_started(output), "--prompt-data"),
        *(write_questions(output / "train.jsonl", 256, seed=2), *GRPO, "--num-rollout", 8),
        *("--rollout-max-response-len", 4, *FORMS[chosen.form]),
        *("--dynamic-sampling-filter-path", f"{RM}:keep_mixed_groups", "--over-sampling-batch-size", 24),
        *("--output-dir", output, "--experiment-name", "grpo"),
    ]
    run_train(f"GRPO with a custom reward: {chosen.form}", flags, output)
    rewards = series(read_metrics(output, "grpo"), "rollout/raw_reward")
    print(f"\nreward of the groups kept: {rewards[0]:.2f} in the first rollout, {rewards[-1]:.2f} in the last")


if __name__ == "__main__":
    main()
