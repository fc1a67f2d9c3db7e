#!/usr/bin/env python3
"""Quantize the linear layers of a Hugging Face checkpoint to 8 bits, for engines that serve in FP8.

    python tools/convert_hf_to_fp8.py --model-dir /models/Qwen3-4B --save-dir /models/Qwen3-4B-FP8

Train with --hf-checkpoint on the result: the trainer reads it as bf16, and every weight sync quantizes in the same way.
Strategies: `block` has one scale per 128 x 128 values (DeepSeek-V3's format), `channel` one per row
(compressed-tensors, float-quantized), `tensor` one per tensor. Only `block` can be trained, because engines rearrange
the others at loading and then accept no new weights. Embeddings, head, norms, routers, vision towers and small tensors
are not quantized.
"""

from __future__ import annotations

import argparse
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

# Names are compared as substrings: "norm" also covers q_norm and post_attention_layernorm.
_KEPT = (
    *("layernorm", "norm", "embed", "router", "lm_head", "weights_proj"),
    # no engine looks for a scale of a router, or of the projection of a prediction layer
    *("mlp.gate.", "shared_expert_gate", "block_sparse_moe.gate.", "eh_proj", "mtp.fc.", "input_proj"),
    *("conv1d", "A_log", "dt_bias", "in_proj_a", "in_proj_b"),
    # engines run vision towers, and what joins them to the language model, in 16 bits whatever the checkpoint says
    *("visual.", "vision_tower.", "vision_model.", "mm_projector.", "multi_modal_projector."),
)
"""Parts of names of matrices that are too small or too delicate for 8 bits, or that engines have in 16 bits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", required=True, help="The checkpoint to read (safetensors).")
    parser.add_argument("--save-dir", required=True, help="The directory to write; must not exist.")
    parser.add_argument(
        "--strategy", choices=("block", "channel", "tensor"), default="block", help="What shares a scale."
    )
    parser.add_argument("--block-size", type=int, nargs=2, default=(128, 128), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--scale-fmt", choices=("ue8m0",), help="Scales that are powers of two.")
    parser.add_argument("--max-workers", type=int, default=1, help="Files that are written at a time.")
    options = parser.parse_args()
    if options.max_workers < 1:
        raise ConfigError(f"--max-workers {options.max_workers} must be at least 1.")
    if min(options.block_size) < 1:
        raise ConfigError(f"--block-size {options.block_size[0]} {options.block_size[1]}: both must be at least 1.")
    if Path(options.save_dir).exists():
        raise ConfigError(f"--save-dir {options.save_dir} exists already.")
    convert(options)


def convert(options: argparse.Namespace) -> None:
    """Write --save-dir, whole or not at all."""
    from slime.backends.training.hf_files import TensorReader, write_hf_directory

    reader = TensorReader(options.model_dir, "--model-dir")
    kept = {name for name in reader.names if not _is_quantised(name, reader)}
    # A generator: the checkpoint is never in memory as a whole.
    weights = _quantised(reader, kept, options)
    config = _config(options, sorted(name.removesuffix(".weight") for name in kept if name.endswith(".weight")))
    write_hf_directory(
        weights, options.model_dir, options.save_dir, quantization=config, num_writers=options.max_workers
    )
    print(f"{len(reader.names) - len(kept)} of {len(reader.names)} tensors in 8 bits -> {options.save_dir}")


def _config(options: argparse.Namespace, kept: Sequence[str]) -> dict[str, Any]:
    if options.strategy == "channel":
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = number | {"strategy": "channel", "dynamic": False}
        activations = number | {"strategy": "token", "dynamic": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations},
            },
            "ignore": sorted({*kept, "lm_head"}),  # a head that is tied to the embedding has no tensor
        }
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if options.strategy == "block":
        # Engines take a config without this key for one scale per tensor.
        config["weight_block_size"] = list(options.block_size)
    if options.scale_fmt is not None:
        config["scale_fmt"] = options.scale_fmt
    return config | {"modules_to_not_convert": list(kept)}


def _is_quantised(name: str, reader: TensorReader) -> bool:
    # Checked before the rank test below, which would silently leave such a tensor in 16 bits.
    if ".experts." in name and len(reader.shape(name)) > 2:
        raise ConfigError(
            f"--model-dir {reader.directory}: {name} holds all experts of a layer, which is not supported yet: engines "
            "would take these 16-bit weights for 8-bit ones. Use a checkpoint with a tensor per expert."
        )
    return name.endswith(".weight") and not any(part in name for part in _KEPT) and len(reader.shape(name)) == 2


def _quantised(reader: TensorReader, kept: set[str], options: argparse.Namespace) -> Iterator[NamedTensor]:
    from slime.weight_sync.quantize import quantize_fp8

    for name in sorted(reader.names):
        tensor = reader.get(name)
        if name in kept:
            yield name, tensor
            continue
        match options.strategy:
            case "block":
                block = tuple(options.block_size)
            case "channel":
                block = (1, tensor.shape[1])
            case _:
                block = None
        values, scale = quantize_fp8(tensor, block, has_power_of_two_scales=options.scale_fmt is not None)
        yield name, values
        # DeepSeek-V3 calls the factor that restores the values "scale_inv". compressed-tensors calls it "scale".
        yield name + ("_scale_inv" if options.strategy == "block" else "_scale"), scale


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
