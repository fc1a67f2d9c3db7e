"""The cost of the checksums of checkpoints: their share of a save and of a load.

    python benchmarks/checkpoints.py [--hidden 768] [--layers 6] [--rounds 5]

One rank of the Megatron backend on CPU saves a random Qwen3 with Adam's moments and loads it again. Prints the medians
in seconds, the bytes per second of the checksum, and the two shares.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.training import checkpoint_files, trainer
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, single_rank


class Stopwatch:
    """Adds up the seconds of the functions that it replaces."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, module: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.monotonic() - started

        setattr(module, name, timed)

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, single_rank():
        measure(Path(directory), options)


def watch() -> tuple[Stopwatch, Stopwatch]:
    """Stopwatches of the checksums while saving, and while loading."""
    from slime.backends.megatron_utils.checkpoint import writer

    saving, loading = Stopwatch(), Stopwatch()
    # The name is imported into both modules, and each calls its own reference.
    saving.watch(writer, "checksums_of")
    saving.watch(checkpoint_files, "checksums_of")
    loading.watch(trainer, "verify_source")
    return saving, loading


def measure(directory: Path, options: argparse.Namespace) -> None:
    hidden, root = options.hidden, directory / "run"
    make_hf_model(
        "qwen3", directory / "hf", hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=options.layers
    )
    saver = MegatronTrainer(make_args(directory / "hf", save=str(root)), rank=0, world_size=1, with_ref=False)
    saver.setup()
    saver.train(0, make_batch())
    saving, loading = watch()
    saves, loads = [], []
    for number in range(options.rounds):
        started = time.monotonic()
        saver.save(0)
        saves.append((time.monotonic() - started, saving.take()))
        loading.take()
        started = time.monotonic()
        args = make_args(directory / "hf", load=str(root))
        MegatronTrainer(args, rank=0, world_size=1, with_ref=False).setup()
        loads.append((time.monotonic() - started, loading.take()))
        print(f"round {number}: save {saves[-1]}, set-up and load {loads[-1]}", flush=True)
    size = sum(path.stat().st_size for path in (root / "iter_0000000").iterdir())
    for what, pairs in (("save", saves), ("load", loads)):
        whole, part = (statistics.median(column) for column in zip(*pairs, strict=True))
        # Relative to the work without checksums. Ratios per round, so that a slow round does not distort them.
        share = statistics.median(checksums / (seconds - checksums) for seconds, checksums in pairs)
        print(
            f"{what}: {size / 1e9:.2f} GB in {whole:.2f} s, of which checksums {part:.2f} s ({size / part / 1e9:.1f} "
            f"GB/s): {share:.1%} on top of a {what} without them"
        )


if __name__ == "__main__":
    main()
