"""Several evaluation sets, each with its own settings, on one machine without a GPU, in about a minute.

    python examples/eval_multi_task/run_tiny.py --output outputs/eval_multi_task

1. "copy 47", and a model that has learned it from a teacher who is wrong half of the time.
2. GRPO. Before, in the middle and at the end the sets of ``eval.yaml`` are evaluated.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.copying import warm_started, write_questions
from examples.tiny.recipe import ROOT, learn, options, series

SETS = ("short", "short_sampled", "overlap")


def write_eval_config(output: Path) -> Path:
    """The file beside this one, with this run's directory in it."""
    text = Path(__file__).with_name("eval.yaml").read_text(encoding="utf-8")
    path = output / "eval.yaml"
    path.write_text(text.replace("root: outputs/eval_multi_task", f"root: {output}"), encoding="utf-8")
    write_questions(output / "short.jsonl", 64, seed=3)
    write_questions(output / "overlap.jsonl", 32, seed=4)
    return path


def main() -> None:
    output = options(__doc__, "eval_multi_task").output
    model, data = warm_started(output), write_questions(output / "train.jsonl", 256, seed=2)
    flags = [
        *("--apply-chat-template", "--rollout-max-response-len", 4),
        *("--custom-rm-path", f"{ROOT}/examples/custom_reward/custom_rm.py"),
        *("--eval-config", write_eval_config(output), "--eval-interval", 4, "--log-passrate"),
    ]
    records = learn("GRPO with three evaluation sets", model, data, flags, output, rollouts=8)
    for name in SETS:
        values = series(records, f"eval/{name}")
        print(f"{name}: {' -> '.join(f'{value:.2f}' for value in values)}")


if __name__ == "__main__":
    main()
