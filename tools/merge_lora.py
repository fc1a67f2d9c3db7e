#!/usr/bin/env python3
"""Merge an adapter of peft into its base: a Hugging Face checkpoint with the weights W + scale B A.

    python tools/merge_lora.py --base /models/Qwen3-4B --adapter /runs/lora/hf --output /models/Qwen3-4B-merged

Tensors are merged one at a time in fp32 and rounded once to the type of the base.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.megatron_utils.conversion import run_tool
from slime.backends.training.adapter_files import base_problems, read_adapter, settings_problems
from slime.models.lora import FILE_PREFIX, tensor_name
from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    from slime.backends import NamedTensor

_STACKS = {"gate_up_proj": ("gate_proj.weight", "up_proj.weight"), "down_proj": ("down_proj.weight",)}
"""Tensors that hold the experts of a layer, and the weights in each expert's rows."""


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
        ConfigError: the adapter belongs to another base, or is more than ``scale B A``.
    """
    from slime.backends.training.hf_files import write_hf_directory

    where = f"--adapter {adapter}"
    config, header = read_adapter(adapter, where)
    metadata = header.get("__metadata__", {})
    if problems := settings_problems(config, where) or base_problems(metadata, where, "--base", base):
        raise ConfigError(problems)
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    write_hf_directory(_merged(base, adapter, scale), base, output)


def _merged(base: str, adapter: str, scale: float) -> Iterator[NamedTensor]:
    import torch

    from slime.backends.training.hf_files import TensorReader

    weights, changes = TensorReader(base, "--base"), TensorReader(adapter, "--adapter")
    left = set(changes.names)

    def added(name: str, weight: torch.Tensor) -> torch.Tensor:
        inner, outer = (FILE_PREFIX + tensor_name(name, matrix) for matrix in ("A", "B"))
        if inner not in changes or outer not in changes:
            return weight
        left.difference_update((inner, outer))
        change = changes.get(outer).float() @ changes.get(inner).float()
        if change.shape != weight.shape:
            raise ConfigError(
                f"--adapter {adapter}: {inner} makes {list(change.shape)}, but {name} of --base {base} has "
                f"{list(weight.shape)}: it is an adapter of another base."
            )
        return (weight.float() + scale * change).to(weight.dtype)

    for name in sorted(weights.names):
        experts, _, leaf = name.rpartition(".")
        if leaf not in _STACKS:
            yield name, added(name, weights.get(name))
            continue
        rows = (weights.row(name, number).chunk(len(_STACKS[leaf])) for number in range(weights.shape(name)[0]))
        names = ([f"{experts}.{number}.{part}" for part in _STACKS[leaf]] for number in itertools.count())
        yield name, torch.stack([torch.cat(list(map(added, *single))) for single in zip(names, rows, strict=False)])
    if left:
        raise ConfigError(
            f"--adapter {adapter}: {min(left)} and {len(left) - 1} more tensors have no weight in --base {base}: it is "
            "an adapter of another base."
        )


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
