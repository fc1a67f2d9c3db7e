#!/usr/bin/env python3
"""Merge an adapter of peft into its base: a Hugging Face checkpoint with the weights W + scale B A.

    python tools/merge_lora.py --base /models/Qwen3-4B --adapter /runs/lora/hf --output /models/Qwen3-4B-merged

Tensors are merged one at a time in fp32 and rounded once to the type of the base.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.megatron_utils.offline import run_tool
from slime.models.lora import CONFIG_FILE, FILE_PREFIX, tensor_name
from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    from slime.backends.protocols import NamedTensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="The Hugging Face directory that the adapter was trained on.")
    parser.add_argument("--adapter", required=True, help="The directory with adapter_config.json.")
    parser.add_argument("--output", required=True, help="The directory to write; must not exist.")
    options = parser.parse_args()
    if Path(options.output).exists():
        raise ConfigError(f"--output {options.output} exists already.")
    merge(options.base, options.adapter, options.output)


def merge(base: str, adapter: str, output: str) -> None:
    """Write the merged checkpoint.

    Raises:
        ConfigError: a tensor of the adapter has no weight in the base, or does not fit it.
    """
    from slime.backends.training.hf_files import write_hf_directory

    write_hf_directory(_merged(base, adapter), base, output)


def _merged(base: str, adapter: str) -> Iterator[NamedTensor]:
    from slime.backends.training.hf_files import TensorReader

    config = json.loads((Path(adapter) / CONFIG_FILE).read_text(encoding="utf-8"))
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    weights, changes = TensorReader(base, "--base"), TensorReader(adapter, "--adapter")
    left = set(changes.names)
    for name in sorted(weights.names):
        inner, outer = (FILE_PREFIX + tensor_name(name, matrix) for matrix in ("A", "B"))
        weight = weights.get(name)
        if inner in changes and outer in changes:
            left -= {inner, outer}
            change = changes.get(outer).float() @ changes.get(inner).float()
            if change.shape != weight.shape:
                raise ConfigError(
                    f"--adapter {adapter}: {inner} makes {list(change.shape)}, but {name} of --base {base} has "
                    f"{list(weight.shape)}: it is an adapter of another base."
                )
            weight = (weight.float() + scale * change).to(weight.dtype)
        yield name, weight
    if left:
        raise ConfigError(
            f"--adapter {adapter}: {min(left)} and {len(left) - 1} more tensors have no weight in --base {base}: it is "
            "an adapter of another base."
        )


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
