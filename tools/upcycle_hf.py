#!/usr/bin/env python3
"""Make a Qwen3 model with experts from a dense one. Its first logits are the dense model's. No GPU is used.

    python tools/upcycle_hf.py --input /models/Qwen3-4B --output /models/Qwen3-4B-8x --copies 8 --topk 2
    python tools/upcycle_hf.py --input /models/Qwen3-4B --output /models/Qwen3-4B-fine --copies 8 --slices 4 --topk 8

--copies N        every MLP becomes N equal experts that training lets drift apart
--slices N        each of them is cut into N narrow experts, of which a token takes all or none
--topk N          experts per token, a multiple of --slices

Give the result as --hf-checkpoint: engines and trainer both need a checkpoint with experts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.megatron_utils.offline import run_tool
from slime.utils.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="The dense checkpoint.")
    parser.add_argument("--output", required=True, help="The directory to write; must not exist.")
    parser.add_argument("--copies", type=int, required=True, help="Experts made of one MLP.")
    parser.add_argument("--slices", type=int, default=1, help="Pieces of each. Default: 1.")
    parser.add_argument("--topk", type=int, required=True, help="Experts per token.")
    parser.add_argument("--seed", type=int, default=1234, help="Of the routers. Default: 1234.")
    options = parser.parse_args()
    if Path(options.output).exists():
        raise ConfigError(f"--output {options.output} exists already.")
    upcycle(options)


def upcycle(options: argparse.Namespace) -> None:
    from slime.backends.megatron_utils.model.upcycling import Upcycling
    from slime.backends.training.hf_files import TensorReader, write_hf_directory

    source = Path(options.input)
    plan = Upcycling(options.copies, options.slices, options.topk, options.seed)
    try:
        dense = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--input {source} has no config.json that can be read: {error}") from None
    config = plan.config(dense)
    reader = TensorReader(source, "--input")
    names = sorted(reader.names)
    weights = ((name, reader.get(name)) for name in names)
    with tempfile.TemporaryDirectory() as directory:  # files for the writer to copy: everything but the dense weights
        for entry in source.iterdir():
            # The index lists the dense tensors. The writer makes a new one.
            if entry.is_file() and entry.suffix not in (".safetensors", ".bin") and ".index." not in entry.name:
                shutil.copy(entry, directory)
        (Path(directory) / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        # Only routers are new weights: they are drawn as the dense model's were.
        std = float(dense.get("initializer_range", 0.02))
        write_hf_directory(plan.weights(weights, std=std), directory, options.output)
    print(f"{len(names)} tensors, {plan.num_experts} experts per layer -> {options.output}")


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
