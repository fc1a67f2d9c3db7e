"""Quantizes weights on their way to engines that were started with a quantized checkpoint.

    fp8    q = x / s as float8_e4m3fn (arXiv:2209.05433), s = max|x| / 448 per block, row or tensor
    int4   q = round(x / s) in -8..7, s = max|x| / 7.5 per group of a row, eight values packed into one int32

Exactly the weights that have a scale in the engines' checkpoint are quantized. Called between the exporter and the
sender. The tools that write quantized checkpoints use the same functions.

Not every format that SGLang 0.5.23 serves can be loaded twice, because it rearranges some for its kernels and does not
undo it (``process_weights_after_loading`` and ``restore_weights_before_loading`` of its schemes):

    format              experts                     every other linear layer
    fp8 by blocks       kept as loaded              kept as loaded
    fp8 by rows         kept as loaded              replaced by its transpose
    fp8 by tensors      scales of w1, w3 merged     replaced by its transpose
    int4 by groups      repacked, undone            repacked

A transposed square matrix would even accept a new tensor. Formats that cannot be loaded twice are refused here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.backends import NamedTensor
from slime.utils.errors import ConfigError

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_LOADED_ONCE = "SGLang rearranges such weights when it has loaded them, and new ones cannot be loaded into them"
# smallest magnitude for a scale: a block of zeros would have scale 0, and 0 / 0 is not a number
_TINY = 1e-10

# scales of int4 are stored in the weight's dtype. A smaller one would be 0 in float16, and x / 0 is not a number.
_SMALLEST_HALF = 2.0**-24


@dataclass(frozen=True)
class Quantizer:
    """The quantization of one checkpoint.

    Attributes:
        names: quantized weights.
        apply: a weight's name and tensor -> its quantized tensors.
        config: the checkpoint's ``quantization_config``.
    """

    names: frozenset[str]
    apply: Callable[[str, torch.Tensor], list[NamedTensor]]
    config: Mapping[str, Any]

    def __call__(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """``weights`` as the engines hold them."""
        for name, tensor in weights:
            # an engine copies a tensor into the parameter of its name: bf16 in an 8-bit parameter would be rounded
            # without a scale, and the model would be wrong without an error
            if name in self.names:
                yield from self.apply(name, tensor)
            else:
                yield name, tensor


def find_quantizer(hf_checkpoint: str) -> Quantizer | None:
    """The quantizer for engines that load ``hf_checkpoint``. None if its weights are not quantized.

    Raises:
        ConfigError: weights of this format cannot be sent.
    """
    directory = Path(hf_checkpoint)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    if config is None:
        return None
    where = f"--hf-checkpoint {hf_checkpoint}: its quantization_config"
    match config.get("quant_method"):
        case "fp8":
            return _fp8(config, _tensor_names(directory), where)
        case "compressed-tensors" if config.get("format") == "float-quantized":
            return _fp8_by_rows(config, _tensor_names(directory), where)
        case "compressed-tensors":
            return _int4(config, _tensor_names(directory), where)
        case method:
            raise ConfigError(
                f"{where} has quant_method {method}, in which weights cannot be sent to engines; fp8 and "
                "compressed-tensors can. Use a checkpoint of one of these, or an unquantized one."
            )


def quantize_fp8(
    tensor: torch.Tensor, block: tuple[int, int] | None, *, has_power_of_two_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[M, N]`` -> float8_e4m3fn ``[M, N]`` and fp32 scales, ``q * scale`` being about the tensor.

    Args:
        block: rows and columns that share a scale. The last block may be smaller. None: one scale for all.
        has_power_of_two_scales: scales are rounded up to powers of two (UE8M0).

    Returns:
        The values, and scales of shape ``[ceil(M / rows), ceil(N / columns)]``, or ``[1]`` without blocks.
    """
    values = tensor.float()
    if block is None:
        scale = _scale(values.abs().amax(), has_power_of_two_scales)
        return _to_fp8(values / scale), scale.view(1)
    (rows, columns), (height, width) = values.shape, block
    # zeros do not change the largest magnitude of a block at the border
    grid = torch.nn.functional.pad(values, (0, -columns % width, 0, -rows % height))
    grid = grid.view(grid.shape[0] // height, height, grid.shape[1] // width, width)
    scale = _scale(grid.abs().amax(dim=(1, 3)), has_power_of_two_scales)
    quantized = grid / scale[:, None, :, None]
    whole = quantized.reshape(quantized.shape[0] * height, -1)
    return _to_fp8(whole[:rows, :columns]), scale


def _scale(largest: torch.Tensor, is_power_of_two: bool) -> torch.Tensor:
    scale = largest.clamp(min=_TINY) / _FP8_MAX
    # rounded up: with a smaller scale the largest value would leave the range
    return torch.exp2(torch.ceil(torch.log2(scale))) if is_power_of_two else scale


def _to_fp8(values: torch.Tensor) -> torch.Tensor:
    # without the clamp, a quotient that was rounded above the largest number would become NaN
    return values.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8).contiguous()


def quantize_int4(tensor: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[M, N]`` -> int32 ``[M, ceil(N / 8)]``, value k of a word in bits 4k, and scales ``[M, N / group_size]``.

    Symmetric: ``x`` is about ``(nibble - 8) * scale``. Scales have the tensor's dtype.

    Raises:
        ValueError: ``group_size`` does not divide N.
    """
    rows, columns = tensor.shape
    if columns % group_size:
        raise ValueError(f"the group size {group_size} does not divide {columns} columns")
    groups = tensor.float().view(rows, columns // group_size, group_size)
    scale = int4_scale(groups).to(tensor.dtype)  # the scale that is stored is the one that is divided by
    return pack_int4(round_int4(groups, scale[..., None]).view(rows, columns)), scale


def int4_scale(groups: torch.Tensor) -> torch.Tensor:
    """``[..., group]`` -> ``[...]``: the scale that maps the largest magnitude of a group to 7.5."""
    return (groups.abs().amax(dim=-1) / 7.5).clamp(min=_SMALLEST_HALF)


def round_int4(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The nearest whole numbers of -8..7 times ``scale``, as floats."""
    return (values / scale.float()).round().clamp(-8, 7)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers of -8..7 ``[M, N]`` -> int32 ``[M, ceil(N / 8)]``. Missing columns become 0."""
    words = torch.nn.functional.pad(values.int() + 8, (0, -values.shape[1] % 8)).view(values.shape[0], -1, 8)
    shifts = torch.arange(0, 32, 4, device=values.device, dtype=torch.int32)
    # summed in int64: the eighth nibble reaches bit 31, which is the sign of the int32 word
    packed = (words << shifts).sum(dim=-1, dtype=torch.int64)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _fp8(config: Mapping[str, Any], names: set[str], where: str) -> Quantizer:
    for key, expected in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if config.get(key, expected) != expected:
            raise ConfigError(f"{where} has {key} {config[key]}; weights can be sent for {expected} only.")
    size = config.get("weight_block_size")
    if size is None:
        raise ConfigError(
            f"{where} has one scale per tensor: {_LOADED_ONCE}. Convert it again: convert_hf_to_fp8.py "
            "--strategy block."
        )
    block = (int(size[0]), int(size[1]))
    is_power_of_two = config.get("scale_fmt") == "ue8m0"

    def apply(name: str, tensor: torch.Tensor) -> list[NamedTensor]:
        values, scale = quantize_fp8(tensor, block, has_power_of_two_scales=is_power_of_two)
        return [(name, values), (name + "_scale_inv", scale)]

    return Quantizer(frozenset(name for name in names if name + "_scale_inv" in names), apply, config)


def _fp8_by_rows(config: Mapping[str, Any], names: set[str], where: str) -> Quantizer:
    expected = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    _only_group(config, expected, where)
    quantized = frozenset(name for name in names if name + "_scale" in names)
    _refuse_others_than_experts(quantized, where, "convert_hf_to_fp8.py --strategy block")

    def apply(name: str, tensor: torch.Tensor) -> list[NamedTensor]:
        values, scale = quantize_fp8(tensor, (1, tensor.shape[1]))
        return [(name, values), (name + "_scale", scale)]

    return Quantizer(quantized, apply, config)


def _int4(config: Mapping[str, Any], names: set[str], where: str) -> Quantizer:
    if config.get("format") not in (None, "pack-quantized"):
        raise ConfigError(
            f"{where} is compressed-tensors of format {config['format']}, in which weights cannot be sent to engines; "
            "pack-quantized and float-quantized can."
        )
    expected = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group_size = int(_only_group(config, expected, where)["group_size"])
    packed = frozenset(name.removesuffix("_packed") for name in names if name.endswith("weight_packed"))
    _refuse_others_than_experts(packed, where, "convert_hf_to_int4_direct.py with its default --ignore-rules")

    def apply(name: str, tensor: torch.Tensor) -> list[NamedTensor]:
        words, scale = quantize_int4(tensor, group_size)
        shape = torch.tensor(tensor.shape, dtype=torch.int32, device=tensor.device)
        return [(name + "_packed", words), (name + "_scale", scale), (name + "_shape", shape)]

    return Quantizer(packed, apply, config)


def _only_group(config: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The weight settings of the only config group of compressed-tensors. Raises if they differ from ``expected``."""
    groups = config.get("config_groups") or {}
    weights: Mapping[str, Any] = next((group.get("weights") or {} for group in groups.values()), {})
    wrong = {key: weights.get(key) for key, value in expected.items() if weights.get(key, value) != value}
    if len(groups) != 1 or wrong:
        raise ConfigError(
            f"{where} is compressed-tensors of format {config.get('format')} with {len(groups)} config groups "
            f"{wrong or ''}: weights can be sent for one group only, of {dict(expected)}."
        )
    return weights


def _refuse_others_than_experts(quantized: Iterable[str], where: str, tool: str) -> None:
    others = sorted(name for name in quantized if ".experts." not in name)
    if others:
        raise ConfigError(
            f"{where} quantizes {len(others)} weights outside of the experts ({others[0]}, ...): {_LOADED_ONCE}. "
            f"Convert it again: {tool}."
        )


def _tensor_names(directory: Path) -> set[str]:
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    names: set[str] = set()
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names
