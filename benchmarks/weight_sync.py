"""Time until new weights reach an engine, for each transport and for a raw broadcast of the same bytes.

    python benchmarks/weight_sync.py

One real engine with a random model of about 100 million parameters. Every round measures each transport once, so that
other work on the machine affects all of them. The table shows medians and their ratios. A sync covers pause, send,
load, flush, verify the version, and continue. With files it also covers the writing, and the deletion of the version
before last. Further columns are the seconds until engines serve the new weights, and the seconds in which they paused.

Three more rows are measured between two processes that do nothing else. The raw broadcast is one collective per bucket
into existing memory. The receiver with a copy also loads as SGLang does: the same collectives, and one copy of every
tensor to the memory of the model. In pieces, the raw broadcast is many collectives at a time, over as many connections
as the sync has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends import EVERY_RANK, EngineInfo, NamedTensor, Recipients
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import server_env
from slime.backends.training.hf_files import write_hf_directory
from slime.utils import accelerator
from slime.utils.distributed_utils import destroy_group, join_group
from slime.utils.net import WEIGHT_INTERFACES, WEIGHT_LOOPBACK, free_port
from slime.weight_sync.chunks import into_chunks
from slime.weight_sync.delta_codec import Encoding
from slime.weight_sync.send_disk import DeltaUpdater, DiskSettings, DiskUpdater
from slime.weight_sync.session import ALONE, WeightUpdate
from slime.weight_sync.updater import Updater, WeightUpdater
from tests.e2e.engines import HostFleet, make_engine
from tools.make_tiny_task import make_tiny_task

_TIMEOUT_S = 300.0
_HOST = "127.0.0.1"
_PIECES = 24


class Weights:
    """Replaces the trainer: the tensors of a checkpoint, of which a share of all bytes changes with each step."""

    def __init__(self, model: Path) -> None:
        from safetensors.torch import load_file

        files = sorted(model.glob("*.safetensors"))
        self._model = str(model)
        self._tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self._generator = torch.Generator().manual_seed(1)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def change(self, share: float) -> None:
        """Change ``share`` of the bytes: the lowest byte of values all over every tensor, as small steps do."""
        for tensor in self._tensors.values():
            data = tensor.view(-1).view(torch.uint8)
            count = int(data.numel() * share)
            # Multiples of the element size address the lowest byte on a little-endian machine.
            where = torch.randint(0, tensor.numel(), (count,), generator=self._generator) * tensor.element_size()
            data[where] += 1

    def export_weights(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        yield from self._tensors.items()

    def save_hf(self, path: str) -> None:
        write_hf_directory(self.export_weights(), self._model, path)


class Broadcast:
    """Another process that receives the same buckets over the same backend.

    Args:
        copies: copy received tensors to other memory.
        pieces: so many collectives per bucket at a time, over all connections. 1: one over the one that gloo makes.
    """

    def __init__(self, sizes: list[int], *, copies: bool = False, pieces: int = 1) -> None:
        self._buckets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        port = free_port()
        command = [sys.executable, __file__, "--receive", json.dumps(sizes), "--port", str(port)]
        command += ["--pieces", str(pieces), *(["--copies"] if copies else [])]
        self._pieces = pieces
        self._receiver = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._group = _join(port, rank=0, pieces=pieces)

    def run(self) -> None:
        assert self._receiver.stdin is not None
        # Starts a round of the other process, which otherwise sleeps and leaves the cores to the sync.
        self._receiver.stdin.write(b"\n")
        self._receiver.stdin.flush()
        dist.barrier(self._group)
        started = time.perf_counter()
        for bucket in self._buckets:
            _broadcast(bucket, self._group, self._pieces)
        dist.barrier(self._group)
        self.seconds = time.perf_counter() - started

    def close(self) -> None:
        assert self._receiver.stdin is not None
        self._receiver.stdin.close()
        destroy_group(self._group)
        self._receiver.wait(30)


def _join(port: int, rank: int, pieces: int) -> Any:
    return join_group(
        _HOST,
        port,
        rank=rank,
        world_size=2,
        group_name=f"raw-{port}",
        backend=accelerator.current().communication_backend,
        timeout_s=_TIMEOUT_S,
        interfaces=None if pieces == 1 else os.environ[WEIGHT_INTERFACES],
    )


def _broadcast(bucket: torch.Tensor, group: Any, pieces: int) -> None:
    parts = bucket.tensor_split(pieces)
    # The list starts all collectives before the first wait.
    for work in [dist.broadcast(part, src=0, group=group, async_op=True) for part in parts]:
        work.wait()


def receive(sizes: list[int], port: int, *, copies: bool, pieces: int) -> None:
    """Body of the other process: one round per line on stdin."""
    torch.set_num_threads(1)
    group = _join(port, rank=1, pieces=pieces)
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    # Written once before the rounds: the first copy into fresh memory also pays for its pages.
    model = [bucket.clone() for bucket in buckets]
    for _ in sys.stdin:
        dist.barrier(group)
        for bucket, part in zip(buckets, model, strict=True):
            _broadcast(bucket, group, pieces)
            if copies:
                part.copy_(bucket)
        dist.barrier(group)
    destroy_group(group)


class WatchedFleet(HostFleet):
    """Notes when its engines were paused, and when they had continued."""

    paused = continued = 0.0

    def start(self, verb: str, *more: Any, **kwargs: Any) -> Any:
        if verb == "pause_generation":
            # Before the request: requests may already pause while it travels.
            self.paused = time.perf_counter()
        calls = super().start(verb, *more, **kwargs)
        if verb == "continue_generation":
            # start only sends the request: engines have continued when they have answered.
            calls.wait(_TIMEOUT_S)
            self.continued = time.perf_counter()
        return calls


@dataclass(frozen=True)
class Sync:
    """One sync in seconds: all of it, until engines served, and while they stood still."""

    total: float
    until_served: float
    stood_still: float


def make_model(root: Path, layers: int) -> Path:
    """A random Qwen3 of about 100 million parameters at 12 layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    task = make_tiny_task(root / "task")
    config = Qwen3Config(
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=24576,
        tie_word_embeddings=True,
    )
    model = root / "model"
    Qwen3ForCausalLM(config).save_pretrained(model)
    for file in Path(task.model).iterdir():
        if file.suffix != ".safetensors" and not (model / file.name).exists():
            (model / file.name).write_bytes(file.read_bytes())
    return model


def measure(options: argparse.Namespace, root: Path) -> dict[str, list[Sync]]:
    """Way -> one sync per round. A broadcast is a sync that serves at its end."""
    model = make_model(root, options.layers)
    weights = Weights(model)
    preloaded = ForkServer(root / "fork_server.log", server_env())
    engine = make_engine(Namespace(model=str(model)), preloaded, root / "engine.log")
    sizes = [chunk.num_bytes for chunk in into_chunks(weights.export_weights(), options.buffer_size)]
    bare = {
        "raw broadcast": Broadcast(sizes),
        "and a copy": Broadcast(sizes, copies=True),
        "in pieces": Broadcast(sizes, pieces=_PIECES),
    }
    # One engine under two addresses of devices: another slot gets the broadcast, the trainer's slot shared memory.
    far = WatchedFleet([engine], [EngineInfo(engine.url, 1, first_slot=1)])
    near = WatchedFleet([engine], [EngineInfo(engine.url, 1, first_slot=0)])
    memory = {"address": _HOST, "timeout_s": _TIMEOUT_S}

    def deltas(encoding: Encoding) -> DeltaUpdater:
        return DeltaUpdater(ALONE, DiskSettings(root / encoding, root / f"{encoding}_copy"), encoding=encoding)

    ways: dict[str, tuple[WatchedFleet, Updater]] = {
        "distributed": (far, WeightUpdater(ALONE, shares_devices=False, **memory)),
        "tensor": (near, WeightUpdater(ALONE, shares_devices=True, **memory)),
        "disk, full": (far, DiskUpdater(ALONE, DiskSettings(root / "full"))),
        "disk, full, host's copy": (far, DiskUpdater(ALONE, DiskSettings(root / "full2", root / "full2_copy"))),
        "disk, delta, xor": (far, deltas("xor")),
        "disk, delta, overwrite": (far, deltas("overwrite")),
    }
    syncs: dict[str, list[Sync]] = {name: [] for name in (*bare, *ways)}
    try:
        engine.start()
        print(f"{weights.num_bytes / 4e6:.0f} M parameters, {weights.num_bytes / 1e6:.0f} MB, {len(sizes)} buckets")
        for number in range(options.rounds + 1):  # the first round makes connections and the delta's base
            weights.change(options.share)
            for name, broadcast in bare.items():
                broadcast.run()
                syncs[name].append(Sync(broadcast.seconds, broadcast.seconds, broadcast.seconds))
            for name, (fleet, updater) in ways.items():
                update = WeightUpdate(str(number), max_chunk_bytes=options.buffer_size, timeout_s=_TIMEOUT_S)
                os.sync()  # otherwise this transport would wait for the disk writes of the one before
                started = time.perf_counter()
                updater.update(fleet, weights, update)
                total = time.perf_counter() - started
                syncs[name].append(Sync(total, fleet.continued - started, fleet.continued - fleet.paused))
            print("  ".join(f"{name} {taken[-1].total:.3f}" for name, taken in syncs.items()), flush=True)
    finally:
        engine.stop()
        preloaded.stop()
        for broadcast in bare.values():
            broadcast.close()
    # Drops the first round.
    return {name: taken[1:] for name, taken in syncs.items()}


def table(syncs: Mapping[str, Sequence[Sync]]) -> str:
    """Medians, the best, and ratios of medians."""

    def median(name: str, field: str = "total") -> float:
        return statistics.median(getattr(sync, field) for sync in syncs[name])

    lines = [
        "| way | median s | best s | until served | stood still | ÷ raw broadcast | ÷ that and a copy | ÷ disk, full |",
        "|---" * 8 + "|",
    ]
    for name, taken in syncs.items():
        seconds = [median(name), min(sync.total for sync in taken)]
        seconds += [median(name, "until_served"), median(name, "stood_still")]
        ratios = [median(name) / median(other) for other in ("raw broadcast", "and a copy", "disk, full")]
        cells = [name, *(f"{value:.3f}" for value in seconds), *(f"{value:.2f}" for value in ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--share", type=float, default=0.01, help="of all bytes, changed before each round")
    parser.add_argument("--buffer-size", type=int, default=512 * 1024**2, help="as --update-weight-buffer-size")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--copies", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pieces", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive is not None:
        receive(json.loads(options.receive), options.port, copies=options.copies, pieces=options.pieces)
        return
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", WEIGHT_INTERFACES: WEIGHT_LOOPBACK}  # as runs on one host have it
    with tempfile.TemporaryDirectory() as folder:
        print(table(measure(options, Path(folder))))


if __name__ == "__main__":
    main()
