"""Weights as quantized engines hold them, against definitions, a library's format and the trainer's reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.training.hf_files import TensorReader
from slime.utils.errors import ConfigError
from slime.weight_sync.quantize import find_quantizer, quantize_fp8, quantize_int4

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BY_TENSOR = FP8 | {"weight_block_size": None}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


BY_ROWS = compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")
PACKED = compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)


def make_checkpoint(directory: Path, config: dict[str, Any] | None, tensors: dict[str, torch.Tensor]) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({} if config is None else {"quantization_config": config}))
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


def weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns)).to(dtype)


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (130, 257), (1, 5)])
def test_every_block_has_its_own_scale_and_its_largest_value_becomes_448(rows: int, columns: int):
    tensor = weight(rows, columns)
    values, scale = quantize_fp8(tensor, (128, 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            block = tensor[part].float()
            assert scale[i, j] == block.abs().max() / 448
            assert values[part].float().abs().max() == 448
            back = values[part].float() * scale[i, j]
            # e4m3 has 3 bits of mantissa: half a step of 1/8 relative, and below its normal range half a step of 2**-9
            assert ((back - block).abs() <= block.abs() / 16 + scale[i, j] * 2**-10).all()
    assert scale.shape == (-(-rows // 128), -(-columns // 128))


def test_a_block_of_zeros_stays_zero():
    values, scale = quantize_fp8(torch.zeros(4, 4), (2, 2))
    assert (values.float() == 0).all()
    assert (scale > 0).all()


def test_power_of_two_scales_never_overflow():
    values, scale = quantize_fp8(weight(64, 64), (32, 32), has_power_of_two_scales=True)
    assert (torch.log2(scale) % 1 == 0).all()
    assert values.float().abs().max() <= 448
    assert values.float().isfinite().all()


def test_without_blocks_one_scale_serves_the_tensor():
    tensor = weight(3, 7)
    _, scale = quantize_fp8(tensor, None)
    assert torch.equal(scale, (tensor.float().abs().max() / 448).view(1))


def test_the_trainer_reads_back_what_engines_are_sent(tmp_path: Path):
    tensor = weight(200, 300)
    values, scale = quantize_fp8(tensor, (128, 128))
    directory = make_checkpoint(tmp_path / "hf", FP8, {"a.weight": values, "a.weight_scale_inv": scale})
    back = TensorReader(directory, "--hf-checkpoint").get("a.weight")
    factors = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(back, (values.float() * factors).bfloat16())
    again, _ = quantize_fp8(back, (128, 128))
    assert torch.equal(again.float(), values.float())  # quantized values are not rounded a second time


def test_four_bits_are_packed_as_the_library_unpacks_them():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    tensor = weight(6, 64)
    words, scale = quantize_int4(tensor, 32)
    values = helpers.unpack_from_int32(words, 4, torch.Size(tensor.shape))
    assert (values.min(), values.max()) == (-8, 7) or values.abs().max() == 7
    back = values.float().view(6, 2, 32) * scale.float()[..., None]
    # half a step, and at the top 7.5 is cut to 7, and a rounded scale may make it a little more
    assert ((back.view(6, 64) - tensor.float()).abs() <= scale.float().repeat_interleave(32, 1) * 0.54).all()


def test_a_group_of_zeros_has_a_scale_that_float16_can_hold():
    """A scale that is rounded to zero would make NaN of 0 / 0, in the whole row with GPTQ."""
    words, scales = quantize_int4(torch.zeros(2, 32, dtype=torch.float16), 32)
    assert (scales > 0).all()
    assert (words == -0x77777778).all()  # every value is 0, stored as 8


def test_columns_that_fill_no_whole_word_are_padded():
    words, scale = quantize_int4(torch.full((2, 4), 7.0), 4)
    assert words.shape == (2, 1)
    assert (scale == 7.0 / 7.5).all()
    assert [words[0, 0].item() >> 4 * k & 15 for k in range(4)] == [15] * 4  # 7.5 rounds to 8, the largest is 7


def test_only_weights_that_have_a_scale_in_the_checkpoint_are_quantised(tmp_path: Path):
    values, scale = quantize_fp8(weight(4, 4), (128, 128))
    stored = {"a.weight": values, "a.weight_scale_inv": scale, "b.weight": weight(4, 4), "norm.weight": torch.ones(4)}
    quantizer = find_quantizer(make_checkpoint(tmp_path / "hf", FP8, stored))
    assert quantizer is not None
    sent = dict(quantizer([("a.weight", weight(4, 4)), ("b.weight", weight(4, 4)), ("norm.weight", torch.ones(4))]))
    assert sent.keys() == stored.keys()
    assert sent["a.weight"].dtype is torch.float8_e4m3fn
    assert sent["b.weight"].dtype is torch.bfloat16
    assert all(sent[name].shape == stored[name].shape for name in stored)


def test_packed_weights_are_sent_under_the_checkpoint_s_names(tmp_path: Path):
    words, scale = quantize_int4(weight(4, 64), 32)
    shape = torch.tensor([4, 64], dtype=torch.int32)
    name = "layers.0.mlp.experts.3.up_proj.weight"
    stored = {name + "_packed": words, name + "_scale": scale, name + "_shape": shape}
    quantizer = find_quantizer(make_checkpoint(tmp_path / "hf", PACKED, stored))
    assert quantizer is not None
    sent = dict(quantizer([(name, weight(4, 64))]))
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], stored[name]) for name in stored)


def test_experts_with_a_scale_per_row_are_sent_as_the_checkpoint_holds_them(tmp_path: Path):
    name, tensor = "layers.0.mlp.experts.3.up_proj.weight", weight(6, 40)
    values, scale = quantize_fp8(tensor, (1, 40))
    assert torch.equal(scale, tensor.float().abs().amax(dim=1, keepdim=True) / 448)
    stored = {name: values, name + "_scale": scale, "layers.0.self_attn.q_proj.weight": weight(4, 4)}
    quantizer = find_quantizer(make_checkpoint(tmp_path / "hf", BY_ROWS, stored))
    assert quantizer is not None
    sent = dict(quantizer([(name, tensor), ("layers.0.self_attn.q_proj.weight", weight(4, 4))]))
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name].float(), stored[name].float()) for name in stored)
    assert sent[name].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("config", "stored", "text"),
    [
        (BY_ROWS, ("a.o_proj.weight", "a.o_proj.weight_scale"), "1 weights outside of the experts \\(a.o_proj.weight"),
        (PACKED, ("a.shared_experts.up_proj.weight_packed",), "1 weights outside of the experts"),
        (BY_TENSOR, ("a.experts.0.up_proj.weight", "a.experts.0.up_proj.weight_scale"), "one scale per tensor"),
    ],
)
def test_what_engines_cannot_load_twice_is_refused(
    config: dict[str, Any], stored: tuple[str, ...], text: str, tmp_path: Path
):
    directory = make_checkpoint(tmp_path / "hf", config, {name: torch.ones(2, 2) for name in stored})
    with pytest.raises(ConfigError, match=f"{text}.*new ones cannot be loaded.*convert_hf_to"):
        find_quantizer(directory)


def test_a_checkpoint_that_is_not_quantised_needs_nothing(tmp_path: Path):
    assert find_quantizer(make_checkpoint(tmp_path / "hf", None, {"a.weight": weight(2, 2)})) is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "mxfp4"}, "quant_method mxfp4"),
        (FP8 | {"fmt": "e5m2"}, "fmt e5m2"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme static"),
        (compressed("nvfp4-pack-quantized", num_bits=4), "format nvfp4-pack-quantized"),
        (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), "strategy': 'tensor'"),
        (compressed("pack-quantized", num_bits=8, type="int"), "num_bits': 8"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "0 config groups"),
    ],
)
def test_a_format_that_cannot_be_written_is_refused(config: dict[str, Any], text: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=text):
        find_quantizer(make_checkpoint(tmp_path / "hf", config, {"a.weight": weight(2, 2)}))
