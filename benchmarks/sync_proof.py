"""Cost of the proof of a weight sync, as a share of a step.

    python benchmarks/sync_proof.py

One real engine with the random model of about 100 million parameters of ``weight_sync.py``. Every round measures a sync
by broadcast without and with the comparison of all tensors, the engine's and the trainer's part of the canary, and one
train step of the same model: forward and backward pass and AdamW of transformers and torch. All of them run on one
thread, one after the other, so that other work on the machine affects all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.weight_sync import Weights, make_model
from slime.backends import EngineInfo
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import server_env
from slime.utils.net import WEIGHT_INTERFACES, WEIGHT_LOOPBACK
from slime.weight_sync.probe import probe_ids
from slime.weight_sync.session import ALONE, WeightUpdate
from slime.weight_sync.updater import WeightUpdater
from tests.e2e.engines import LocalFleet, make_engine, proof_of

_TIMEOUT_S = 600.0


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(options: argparse.Namespace, root: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_model(root, options.layers)
    trainer = Weights(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = probe_ids(model.config.vocab_size)
    batch = torch.randint(4, 1000, (options.samples, options.tokens))
    preloaded = ForkServer(root / "fork_server.log", server_env())
    engine = make_engine(Namespace(model=str(path)), preloaded, root / "engine.log")
    # with a slot, as in a run: servers of others use one connection, and the engine would wait for the rest
    fleet = LocalFleet([engine], [EngineInfo(engine.url, 1, first_slot=0)])
    updater = WeightUpdater(ALONE, address="127.0.0.1", shares_devices=False, timeout_s=_TIMEOUT_S)
    plain = WeightUpdate("0", max_chunk_bytes=512 * 1024**2, timeout_s=_TIMEOUT_S)
    proved = WeightUpdate("0", max_chunk_bytes=512 * 1024**2, timeout_s=_TIMEOUT_S, proof=proof_of(str(path)))

    def score() -> None:
        with torch.no_grad():
            model(torch.tensor([ids]))

    def step() -> None:
        for sample in batch.split(1):
            model(sample, labels=sample).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    parts: dict[str, Callable[[], object]] = {
        "sync": lambda: updater.update(fleet, trainer, plain),
        "sync with all tensors compared": lambda: updater.update(fleet, trainer, proved),
        "canary, engine": lambda: fleet.start("canary", token_ids=ids).wait(_TIMEOUT_S),
        "canary, trainer": score,
        f"train step of {options.samples} samples of {options.tokens} tokens": step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    try:
        engine.start()
        for number in range(options.rounds + 1):  # the first round makes connections
            trainer.change(0.01)
            for name, work in parts.items():
                seconds[name].append(timed(work))
            print(number, "  ".join(f"{name} {taken[-1]:.3f}" for name, taken in seconds.items()), flush=True)
    finally:
        updater.disconnect(is_urgent=True)
        engine.stop()
        preloaded.stop()
    medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    sync, compared, asked, scored, trained = medians.values()
    print("| part | median s |\n|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value:.3f} |")
    cost = compared - sync + asked + scored
    print(f"both checks {cost:.3f} s, {cost / (trained + compared):.2%} of train step and sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", WEIGHT_INTERFACES: WEIGHT_LOOPBACK}  # as runs on one host have it
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
