"""Time and memory from scored groups to the shipments of the trainer's ranks.

    python benchmarks/batch_pipeline.py            8,000 samples of 4,000 tokens, 8 data-parallel ranks

Times the conversion to columns, the schedule and the split into tensors, and reports the peak memory of these steps
including their tensors. The shipments must hold no lists of tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.batch.schedule import MicroBatchArgs, ParallelLayout
from slime.batch.ship import split_by_dp
from slime.data.columns import column
from slime.data.sample import Sample
from slime.doctor.gpu_kernels import HostPeak


def make_groups(num_samples: int, num_tokens: int, group_size: int) -> list[list[Sample]]:
    """Groups as a rollout leaves them: lists of ids, of log-probs, no mask."""
    rng = random.Random(1)
    groups = []
    for start in range(0, num_samples, group_size):
        group = []
        for index in range(start, start + group_size):
            prompt = rng.randrange(100, 500)
            sample = Sample(group_index=start // group_size, index=index, reward=float(index % 2))
            # 17 bits: real ids are beyond Python's cache of small integers, so each takes its own memory.
            sample.tokens = [rng.getrandbits(17) for _ in range(num_tokens)]
            sample.response_length = num_tokens - prompt
            sample.rollout_log_probs = [-rng.random() for _ in range(num_tokens - prompt)]
            sample.status = Sample.Status.COMPLETED
            group.append(sample)
        groups.append(group)
    return groups


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, list | tuple) else []


def token_lists(batch: dict[str, Any]) -> list[str]:
    """Columns that ship one Python list of numbers per sample."""
    found = []
    for name, values in batch.items():
        is_per_sample = column(name).per == "sample" and isinstance(values, list)
        # Short lists, such as a few names per sample, are allowed.
        if is_per_sample and any(isinstance(value, list) and len(value) > 100 for value in values):
            found.append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    # Made outside of the measured block: the rollout pays for them.
    groups = make_groups(options.samples, options.tokens, options.group_size)
    rewards = RewardArgs(n_samples_per_prompt=options.group_size)
    settings = MicroBatchArgs(use_dynamic_batch_size=True, max_tokens_per_gpu=4 * options.tokens)
    with HostPeak() as memory:
        started = time.perf_counter()
        data = compile_train_data(groups, rewards=rewards)
        compiled = time.perf_counter()
        shipment = split_by_dp(
            data, layout=ParallelLayout(dp_size=options.ranks), global_batch_size=options.samples, settings=settings
        )
        done = time.perf_counter()
    tensors = [tensor for batch in shipment.ranks for values in batch.values() for tensor in tensors_of(values)]
    # The storage, not the view: a view that keeps a large buffer alive costs the whole buffer.
    size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    lists = sorted({name for batch in shipment.ranks for name in token_lists(batch)})
    result = {
        "samples": options.samples,
        "tokens_per_sample": options.tokens,
        "compile_s": round(compiled - started, 2),
        "schedule_and_split_s": round(done - compiled, 2),
        "tensors_mib": round(size / 2**20),
        "peak_mib": round(memory.peak / 2**20),
        "peak_by_tensors": round(memory.peak / size, 2),
        "lists_of_tokens_shipped": lists,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
