#!/usr/bin/env python3
"""Quantize the experts of a Hugging Face checkpoint to 4 bits by rounding, for engines that serve in INT4.

    python tools/convert_hf_to_int4_direct.py --model-dir /models/Qwen3-30B-A3B --save-dir /models/Qwen3-30B-A3B-INT4

Writes compressed-tensors, pack-quantized, symmetric, one scale per --group-size values of a row. Train with
--hf-checkpoint on the result: the trainer reads it as bf16, and every weight sync quantizes in the same way.
--ignore-rules are regular expressions of modules that keep their precision. By default only experts are quantized. A
dense model needs other rules, such as `lm_head embed norm`, and cannot be trained: engines rearrange quantized weights
outside of the experts at loading, and then accept no new ones. Uses no GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.megatron_utils.conversion import run_tool
from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    from slime.backends import NamedTensor
    from slime.backends.training.hf_files import TensorReader

_IGNORED = (
    *("lm_head", "norm", "embed", "self_attn", "linear_attn", "shared_expert", "visual"),
    *(r"mlp\.(gate|up|gate_up|down)_proj", r"mlp\.gate$", r"block_sparse_moe\.gate$", r"router"),
    *("eh_proj", r"mtp\.fc$", "input_proj"),  # of prediction layers
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", required=True, help="The checkpoint to read (safetensors).")
    parser.add_argument("--save-dir", required=True, help="The directory to write; must not exist.")
    parser.add_argument("--group-size", type=int, default=32, help="Values of a row that share a scale.")
    parser.add_argument(
        "--is-symmetric", action="store_true", default=True, help="Without zero points; nothing else is written."
    )
    parser.add_argument("--ignore-rules", nargs="*", default=_IGNORED, metavar="PATTERN", help="What stays as it is.")
    parser.add_argument("--max-workers", type=int, default=1, help="Files that are written at a time.")
    options = parser.parse_args()
    if options.max_workers < 1:
        raise ConfigError(f"--max-workers {options.max_workers} must be at least 1.")
    if options.group_size < 1:
        raise ConfigError(f"--group-size {options.group_size} must be at least 1.")
    if Path(options.save_dir).exists():
        raise ConfigError(f"--save-dir {options.save_dir} exists already.")
    convert(options)


def convert(options: argparse.Namespace) -> None:
    """Write --save-dir, whole or not at all."""
    from slime.backends.training.hf_files import TensorReader, write_hf_directory

    reader = TensorReader(options.model_dir, "--model-dir")
    rules = [_compiled(rule) for rule in options.ignore_rules]
    quantised = {name for name in reader.names if _is_quantised(name, reader, rules)}
    if not quantised:
        raise ConfigError(f"--ignore-rules {' '.join(options.ignore_rules)} leave no matrix of {options.model_dir}.")
    weights = _quantised(reader, quantised, options.group_size)
    # Engines match from the start of a name, this tool searches anywhere: hence the leading ".*".
    ignored = [f"re:.*{rule}" if rule.endswith("$") else f"re:.*{rule}.*" for rule in options.ignore_rules]
    config = quantization_config(options.group_size, ignored)
    write_hf_directory(
        weights, options.model_dir, options.save_dir, quantization=config, num_writers=options.max_workers
    )
    print(f"{len(quantised)} of {len(reader.names)} tensors in 4 bits -> {options.save_dir}")


def _compiled(rule: str) -> re.Pattern[str]:
    try:
        return re.compile(rule)
    except re.error as error:
        raise ConfigError(f"--ignore-rules {rule}: no regular expression: {error}.") from None


def _is_quantised(name: str, reader: TensorReader, rules: Sequence[re.Pattern[str]]) -> bool:
    # A name without ".weight", such as a bias, stays unchanged.
    module = name.removesuffix(".weight")
    is_kept = module == name or any(rule.search(module) for rule in rules)
    return not is_kept and len(reader.shape(name)) == 2


def _quantised(reader: TensorReader, quantised: set[str], group_size: int) -> Iterator[NamedTensor]:
    import torch

    from slime.weight_sync.quantize import quantize_int4

    for name in sorted(reader.names):
        tensor = reader.get(name)
        if name not in quantised:
            yield name, tensor
            continue
        try:
            words, scale = quantize_int4(tensor, group_size)
        except ValueError as error:
            raise ConfigError(f"--group-size {group_size}: {name}: {error}. Add a rule to --ignore-rules.") from None
        yield f"{name}_packed", words
        yield f"{name}_scale", scale
        # Packed words may be padded, so the format stores the original shape.
        yield f"{name}_shape", torch.tensor(tensor.shape, dtype=torch.int32)


def quantization_config(group_size: int, ignored: Sequence[str]) -> dict[str, Any]:
    """The entry of config.json. ``ignored``: names of modules, or patterns that begin with ``re:``."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        # No "input_activations": engines compute with 16-bit activations (W4A16).
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | {"dynamic": False}}},
        "ignore": list(ignored),
    }


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
