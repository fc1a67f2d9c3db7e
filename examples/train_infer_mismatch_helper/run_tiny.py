"""Corrections of the gap between trainer and engine on one machine without a GPU, in about a minute.

    python examples/train_infer_mismatch_helper/run_tiny.py --output outputs/mismatch

1. "copy 47", and a model that has learned it from a teacher who is wrong half of the time.
2. GRPO by weights that are older than the trainer's (``train_async.py``), corrected by ``mis.py``. Its metrics show
   the gap and the correction.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.copying import warm_started, write_questions
from examples.tiny.recipe import ROOT, learn, options, print_first_and_last, series

HERE = Path(__file__).parent


def main() -> None:
    output = options(__doc__, "mismatch").output
    shutil.copy(HERE / "mis.yaml", output)
    model, data = warm_started(output), write_questions(output / "train.jsonl", 256, seed=2)
    flags = [
        *("--apply-chat-template", "--rollout-max-response-len", 4),
        *("--custom-rm-path", f"{ROOT}/examples/custom_reward/custom_rm.py"),
        *("--use-tis", "--custom-tis-function-path", f"{HERE / 'mis.py'}:compute_mis_weights_with_cp"),
        *("--custom-config-path", output / "mis.yaml", "--async-buffer-size", 2),
    ]
    title = "asynchronous GRPO with importance weights and rejection"
    records = learn(title, model, data, flags, output, rollouts=8, script="train_async.py")
    print_first_and_last("reward of a response", records)
    for name in sorted({name for record in records for name in record if name.startswith("train/mis_")}):
        print(f"{name}: {series(records, name)[-1]:.4g}")


if __name__ == "__main__":
    main()
