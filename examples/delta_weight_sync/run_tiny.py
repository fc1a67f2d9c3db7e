"""Weights as differences through files, on one machine without a GPU.

    python examples/delta_weight_sync/run_tiny.py --output outputs/delta_weight_sync

1. "copy 47", and a model that has learned it from a teacher who is wrong half of the time.
2. GRPO in bfloat16. The first version of the weights is written whole, the later ones as differences.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.copying import warm_started, write_questions
from examples.tiny.recipe import ROOT, learn, options, print_first_and_last
from slime.weight_sync.version_store import read_manifest


def main() -> None:
    output = options(__doc__, "delta_weight_sync").output
    model, data = warm_started(output), write_questions(output / "train.jsonl", 256, seed=2)
    flags = [
        # Smaller than in the other examples: most bfloat16 weights stay equal in a step, so deltas are small.
        *("--apply-chat-template", "--rollout-max-response-len", 4, "--lr", "2e-5", "--min-lr", "2e-5"),
        *("--custom-rm-path", f"{ROOT}/examples/custom_reward/custom_rm.py"),
        *("--update-weight-mode", "delta", "--update-weight-transport", "disk"),
        *("--update-weight-disk-dir", output / "shared", "--update-weight-local-checkpoint-dir", output / "local"),
        # Keeps old versions for the list of sizes below.
        *("--update-weight-disk-keep-files", "--check-weight-update-equal"),
    ]
    records = learn("GRPO with deltas", model, data, flags, output, rollouts=5, precision="--bf16")
    print_first_and_last("reward of a response", records)
    for version in sorted((output / "shared").glob("weight_v*")):
        size = sum(file.stat().st_size for file in version.iterdir())
        kind = "changes since the version before" if read_manifest(version).is_delta else "all weights"
        print(f"{version.name}: {size} bytes, {kind}")


if __name__ == "__main__":
    main()
