"""On-policy distillation on one machine without a GPU, in about a minute.

    python examples/on_policy_distillation/run_tiny.py --output outputs/opd
    python examples/on_policy_distillation/run_tiny.py --output outputs/opd_megatron --opd-type megatron

1. One supervised run, two checkpoints: the student, who answers "pass" half of the time, and later the teacher, who
   never does.
2. The student samples, and the teacher computes the log-prob of every token, without a reward. With ``sglang`` the
   teacher is a second engine that the reward function calls. With ``megatron`` the trainer holds it.
3. An evaluation before and after: the student has the teacher's accuracy.
"""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import (
    ROWS_PER_ROLLOUT,
    learn,
    make_model,
    options,
    series,
    serve,
    warm_start,
    write_rows,
)

NAMES = ("amber", "basil", "cedar", "dahlia", "fennel", "hazel", "iris", "kelp", "laurel", "mint", "olive", "rose")
WORDS = (*NAMES, "repeat", "pass")
STUDENT_ROLLOUTS, TEACHER_ROLLOUTS = 3, 1


def question(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"repeat {name}"}]


def demonstrations() -> list[dict[str, Any]]:
    """First the student's, then those that make a teacher of it."""
    draw = random.Random(1)
    rows = []
    for number in range((STUDENT_ROLLOUTS + TEACHER_ROLLOUTS) * ROWS_PER_ROLLOUT):
        name = draw.choice(NAMES)
        is_students = number < STUDENT_ROLLOUTS * ROWS_PER_ROLLOUT
        answer = "pass" if is_students and draw.random() < 0.5 else name
        # warm_start keeps this order, which splits the run into student and teacher.
        rows.append({"prompt": question(name), "metadata": {"segments": [[f"{answer}<|im_end|>", 1]]}})
    return rows


def teacher_flags(kind: str, teacher: str, output: Path, stack: ExitStack) -> list[Any]:
    """Flags that select the source of the teacher's log-probs."""
    if kind == "sglang":
        here = "slime.rollout.on_policy_distillation"
        url = stack.enter_context(serve(teacher, output))
        return [
            *("--use-opd", "--opd-type", "sglang", "--rm-url", f"{url}/generate"),
            *("--custom-rm-path", f"{here}.reward_func"),
            *("--custom-reward-post-process-path", f"{here}.post_process_rewards"),
        ]
    return [
        *("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", output / "warm_start" / "checkpoints"),
        *("--custom-rm-path", "examples.on_policy_distillation.reward.no_reward"),
    ]


def main() -> None:
    chosen = options(__doc__, "opd", opd_type=("sglang", "megatron"))
    output: Path = chosen.output
    data = write_rows(output / "train.jsonl", ({"prompt": question(name), "label": name} for name in NAMES * 8))
    total = STUDENT_ROLLOUTS + TEACHER_ROLLOUTS
    teacher = warm_start(make_model(output, WORDS), demonstrations(), output, rollouts=total, save_interval=1)
    student = output / "warm_start" / f"hf_{STUDENT_ROLLOUTS - 1}"
    # The evaluation needs a separate reward function, because that of training calls the teacher.
    held_out = {"name": "repeat", "path": data, "custom_rm_path": "examples.on_policy_distillation.reward.exact_match"}
    (output / "eval.yaml").write_text(yaml.safe_dump({"eval": {"datasets": [held_out]}}), encoding="utf-8")
    with ExitStack() as stack:
        flags = [
            *("--apply-chat-template", "--rollout-max-response-len", 4),
            *teacher_flags(chosen.opd_type, teacher, output, stack),
            *("--eval-config", output / "eval.yaml", "--eval-interval", 8, "--n-samples-per-eval-prompt", 1),
        ]
        title = f"on-policy distillation, teacher: {chosen.opd_type}"
        records = learn(title, str(student), data, flags, output, rollouts=8)
    distance, accuracy = series(records, "train/opd_reverse_kl"), series(records, "eval/repeat")
    print(f"reverse KL from student to teacher per token: {distance[0]:.3f} first, {distance[-1]:.3f} last")
    print(f"accuracy of the student: {accuracy[0]:.2f} before, {accuracy[-1]:.2f} after")


if __name__ == "__main__":
    main()
