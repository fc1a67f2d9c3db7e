"""The asynchronous loop: the next rollouts are generated while the trainer works. ``slime train-async`` is the same.

python train_async.py --hf-checkpoint MODEL --prompt-data FILE --rollout-num-gpus 2 --actor-num-gpus-per-node 2 ...

The loop is in slime/ray/run/main.py.
"""

import sys

from slime.ray.run.main import main_async as main
from slime.ray.run.main import train_async as train

__all__ = ["main", "train"]

if __name__ == "__main__":
    sys.exit(main())
