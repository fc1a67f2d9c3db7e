"""Bytes and seconds of a sync of adapters (--lora-rank) against a full sync of the same model.

    python benchmarks/adapter_sync.py

One real engine that serves adapters, with the random model of about 100 million parameters of ``weight_sync.py``. Every
round measures a full sync by broadcast and a sync of random adapters of all linear layers, one after the other, so that
other work on the machine affects both. A sync covers pause, send, load, flush, verify the version, and continue. The
proof that the engine computes with the adapter comes after it and is measured separately, without the trainer's part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.weight_sync import Weights, make_model
from slime.backends import EVERY_RANK, EngineInfo, NamedTensor, Recipients
from slime.backends.sglang_utils.feature_rules import adapter_words
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import server_env
from slime.backends.training.arguments import LoraArgs
from slime.config.groups import from_args
from slime.data.engine_fields import FieldFlags
from slime.models.hf_shape import read_shape
from slime.models.lora import LoraConfig, adapter_tensors
from slime.utils.net import WEIGHT_INTERFACES, WEIGHT_LOOPBACK
from slime.weight_sync.probe import probe_ids
from slime.weight_sync.send_adapter import AdapterUpdater
from slime.weight_sync.session import ALONE, WeightUpdate
from slime.weight_sync.updater import WeightUpdater
from tests.e2e.engines import LocalFleet, make_engine

_TIMEOUT_S = 300.0


class Adapters(Weights):
    """Replaces the trainer: random adapters beside the tensors of a checkpoint."""

    def __init__(self, model: Path, config: LoraConfig) -> None:
        super().__init__(model)
        sizes = adapter_tensors(read_shape(str(model)), config)
        self._adapters = {name: torch.randn(size) * 0.01 for name, size in sizes.items()}

    def export_adapter(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        yield from self._adapters.items()


def measure(options: argparse.Namespace, root: Path) -> None:
    model = make_model(root, options.layers)
    args = Namespace(**vars(LoraArgs(lora_rank=options.rank)), hf_checkpoint=str(model))
    config = LoraConfig.of(vars(args))
    assert config is not None
    trainer = Adapters(model, config)
    preloaded = ForkServer(root / "fork_server.log", server_env())
    engine = make_engine(Namespace(model=str(model)), preloaded, root / "engine.log", *adapter_words(args))
    # the base travels through shared memory: a second process group of the same name would wait for the first one
    fleet = LocalFleet([engine], [EngineInfo(engine.url, 1, first_slot=0)])
    full, base = (
        WeightUpdater(ALONE, address="127.0.0.1", shares_devices=is_near, timeout_s=_TIMEOUT_S)
        for is_near in (False, True)
    )
    ways = {"full": full, "adapter": AdapterUpdater(ALONE, config, base, lambda trainer, path: None)}
    seconds: dict[str, list[float]] = {"full": [], "adapter": [], "proof": []}
    num_bytes = {}
    try:
        engine.start()
        for number in range(options.rounds + 1):  # the first round makes connections and sends the base
            for name, updater in ways.items():
                # both as the same version: an engine with another one would get the base again
                update = WeightUpdate("0", max_chunk_bytes=512 * 1024**2, timeout_s=_TIMEOUT_S)
                started = time.perf_counter()
                num_bytes[name] = updater.update(fleet, trainer, update)
                seconds[name].append(time.perf_counter() - started)
            started = time.perf_counter()
            fleet.start("probe", token_ids=probe_ids(24576), fields=from_args(FieldFlags, args).adapter_fields).wait(
                _TIMEOUT_S
            )
            seconds["proof"].append(time.perf_counter() - started)
            print(number, "  ".join(f"{name} {taken[-1]:.3f}" for name, taken in seconds.items()), flush=True)
    finally:
        engine.stop()
        preloaded.stop()
    medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    print("| sync | MB | median s |\n|---|---|---|")
    for name, value in medians.items():
        print(
            f"| {name} | {num_bytes[name] / 1e6:.1f} | {value:.3f} |"
            if name in num_bytes
            else f"| {name} |  | {value:.3f} |"
        )
    print(f"bytes {num_bytes['adapter'] / num_bytes['full']:.4f}, seconds {medians['adapter'] / medians['full']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", WEIGHT_INTERFACES: WEIGHT_LOOPBACK}  # as runs on one host have it
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
