"""The batches of a rollout in Ray's object store, with a real Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

_CODE = """
import time
import ray
from slime.ray.shards import boxed
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

@ray.remote
class Manager:
    def generate(self):
        return boxed([{"tokens": [0] * 100_000}] * 3)

    def num_entries(self):
        return ray._private.worker.global_worker.core_worker.get_memory_store_size()

@ray.remote
class Trainer:
    def train(self, boxes):
        return [len(ray.get(box.inner)["tokens"]) for box in boxes]

manager, trainer = Manager.remote(), Trainer.remote()
for _ in range(60):
    assert ray.get(trainer.train.remote(ray.get(manager.generate.remote()))) == [100_000] * 3
    time.sleep(0.02)
print("entries", ray.get(manager.num_entries.remote()))
"""


def test_a_rank_that_puts_batches_into_the_store_keeps_nothing_of_those_that_were_trained():
    env = os.environ | {"SLIME_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", _CODE], env=env, capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout.split()[-1]) <= 3 * 17
