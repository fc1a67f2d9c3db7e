"""Fully asynchronous training on one machine without a GPU, in about a minute.

    python examples/fully_async/run_tiny.py --output outputs/fully_async

1. "copy 47", and a model that has learned it from a teacher who is wrong half of the time.
2. ``train_async.py`` with a worker that generates continuously: the trainer takes finished groups,
   and no sample is older than ``--max-weight-staleness`` rollouts.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.copying import warm_started, write_questions
from examples.tiny.recipe import ROOT, learn, options, print_first_and_last, series


def main() -> None:
    output = options(__doc__, "fully_async").output
    model, data = warm_started(output), write_questions(output / "train.jsonl", 256, seed=2)
    flags = [
        *("--apply-chat-template", "--rollout-max-response-len", 4),
        *("--custom-rm-path", f"{ROOT}/examples/custom_reward/custom_rm.py"),
        *("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
        # Samples of older weights need the importance weights of --use-tis.
        *("--max-weight-staleness", 2, "--use-tis"),
    ]
    records = learn("fully asynchronous GRPO", model, data, flags, output, rollouts=10, script="train_async.py")
    print_first_and_last("reward of a response", records)
    lag = max(series(records, "rollout/weight_version_lag"))
    print(f"rollouts by which the weights lagged: at most {lag:.0f}")


if __name__ == "__main__":
    main()
