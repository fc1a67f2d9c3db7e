"""Bytes and seconds of one rollout in the journal of finished rollouts: figures of docs/reliability.md.

python benchmarks/journal.py [--samples N] [--tokens N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from slime.config.groups import RunConfig
from slime.data.sample import Sample
from slime.ray.journal import Entry, Journal


def _samples(count: int, length: int) -> list[Sample]:
    chance = random.Random(0)
    log_probs = (-torch.rand(length)).tolist()  # of float32, as an engine reports them
    text = "".join(chance.choices("abcdefgh ,.", k=4 * length))
    return [
        Sample(
            group_index=number // 8,
            index=number,
            tokens=chance.choices(range(150_000), k=length),
            response=f"{text}{number}",
            response_length=length,
            loss_mask=[1] * length,
            rollout_log_probs=log_probs.copy(),
            weight_versions=["3"],
            reward=1.0,
            status=Sample.Status.COMPLETED,
        )
        for number in range(count)
    ]


def measure(folder: Path, count: int, length: int) -> None:
    """Write and read one rollout, and print bytes and seconds."""
    names = ("start_rollout_id", "debug_train_only", "debug_rollout_only", "keep_old_actor", "load_debug_rollout_data")
    args = Namespace(**dict.fromkeys(names), save=str(folder), load=str(folder), save_interval=1)
    samples = _samples(count, length)
    journal, started, cpu = Journal(RunConfig.of(args)), time.perf_counter(), time.process_time()
    journal.add(0, Entry([samples], {}, "3"))
    packed, cpu = time.perf_counter() - started, time.process_time() - cpu
    journal.wait(0)
    written = time.perf_counter() - started - packed
    size = sum(path.stat().st_size for path in (folder / "rollout" / "journal").iterdir())
    again, started = Journal(RunConfig.of(args)), time.perf_counter()
    assert again.begin(0) == 1
    found = again.take(0)
    assert found is not None
    read = time.perf_counter() - started
    assert [sample.tokens for sample in found.groups[0]] == [sample.tokens for sample in samples]
    print(f"{count} samples of {length} tokens: {size / 1e6:.0f} MB, {size / count / length:.1f} bytes per token")
    print(f"packed in {packed:.1f} s ({cpu:.1f} s of processor time), written in {written:.1f} s, read in {read:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32_768, help="per response")
    parser.add_argument("--folder", help="on the disk to measure. Default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), options.samples, options.tokens)


if __name__ == "__main__":
    main()
