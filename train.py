"""The synchronous loop: generate, train, send the new weights, again. ``slime train`` is the same.

python train.py --hf-checkpoint MODEL --prompt-data FILE --rollout-num-gpus 2 --actor-num-gpus-per-node 2 ...

The loop is in slime/ray/run/main.py.
"""

import sys

from slime.ray.run.main import main, train

__all__ = ["main", "train"]

if __name__ == "__main__":
    sys.exit(main())
