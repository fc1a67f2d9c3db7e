"""GPTQ against its definition without the paper's short cuts, and the tool on models made by code."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.backends.training.hf_files import TensorReader
from slime.weight_sync.quantize import int4_scale, quantize_int4, round_int4
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tools.convert_hf_to_int4 import quantise_model
from tools.gptq import InputStatistics, quantise, squared_error

CPU = torch.device("cpu")


def inputs(count: int, size: int, *, rank: int) -> torch.Tensor:
    """Rows that move together, as activations do: ``rank`` directions and a little noise."""
    generator = torch.Generator().manual_seed(size)
    mixed = torch.randn(count, rank, generator=generator) @ torch.randn(rank, size, generator=generator)
    return mixed + 0.1 * torch.randn(count, size, generator=generator)


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))


def statistics(x: torch.Tensor) -> torch.Tensor:
    found = InputStatistics(x.shape[-1], CPU)
    for part in x.split(100):
        found.add(part)
    return found.products


def one_by_one(w: torch.Tensor, products: torch.Tensor, group: int, dampening: float) -> torch.Tensor:
    """Optimal brain quantization in the order of the columns, with the inverse Hessian shrunk after each of them."""
    left, columns = w.double().clone(), w.shape[1]
    hessian = products.double()
    hessian = hessian + dampening * hessian.diagonal().mean() * torch.eye(columns).double()
    inverse, values = torch.linalg.inv(hessian), torch.empty_like(w)
    for j in range(columns):
        if j % group == 0:
            scale = int4_scale(left[:, j : j + group].float())
        values[:, j] = round_int4(left[:, j].float(), scale)
        error = left[:, j] - values[:, j] * scale
        left -= error[:, None] * (inverse[j] / inverse[j, j])
        inverse = inverse - inverse[:, j, None] * inverse[None, j] / inverse[j, j]
    return values


@pytest.mark.parametrize(("columns", "group"), [(64, 16), (288, 32), (240, 48), (300, 150)])
def test_it_is_optimal_brain_quantisation_column_by_column(columns: int, group: int) -> None:
    w, products = weight(6, columns), statistics(inputs(400, columns, rank=20))
    values, scales = quantise(w, products, group, 0.01)
    assert scales.shape == (6, columns // group)
    expected = one_by_one(w, products, group, 0.01)
    # single precision may round a value half way between two steps to the other side, and later values compensate
    assert (values != expected).float().mean() < 0.02
    assert (values - expected).abs().max() <= 2


def test_outputs_are_nearer_than_with_rounding_to_nearest() -> None:
    x, w = inputs(500, 256, rank=30), weight(16, 256)
    products = statistics(x)
    values, scales = quantise(w, products, 32, 0.01)
    difference = values * scales.repeat_interleave(32, 1) - w
    groups = w.unflatten(1, (-1, 32))
    scale = int4_scale(groups)[..., None]
    rounded = (round_int4(groups, scale) * scale).flatten(1) - w
    assert squared_error(difference, products) == pytest.approx(float((x @ difference.T).square().sum()), rel=1e-3)
    assert squared_error(difference, products) < 0.4 * squared_error(rounded, products)
    assert squared_error(difference, products) < squared_error(torch.zeros_like(w) - w, products)


@pytest.mark.parametrize("num_inputs", [0, 7])
def test_inputs_that_have_nothing_to_do_with_each_other_leave_rounding_to_nearest(num_inputs: int) -> None:
    w, products = weight(4, 96), num_inputs * torch.eye(96)
    values, scales = quantise(w, products, 32, 0.01)
    groups = w.unflatten(1, (-1, 32))
    assert torch.equal(scales, int4_scale(groups))
    assert torch.equal(values, round_int4(groups, int4_scale(groups)[..., None]).flatten(1))


def test_experts_are_calibrated_on_the_tokens_that_reach_them(tmp_path: Path) -> None:
    make_family_checkpoint("qwen3_moe", tmp_path / "hf")
    texts = torch.randint(3, 60, (12, 40), generator=torch.Generator().manual_seed(1)).tolist()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", experts_implementation="eager").eval()
    reader = TensorReader(tmp_path / "hf", "")
    options = Namespace(input_dir="hf", quant_group_size=8, dampening_frac=0.01)
    quantised = quantise_model(model, texts, reader.names, options)
    expected = {name for name in reader.names if "_proj" in name}
    assert quantised.keys() == expected
    assert sum(".experts." in name for name in quantised) == 2 * 8 * 3

    def logits(of: dict[str, torch.Tensor]) -> torch.Tensor:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", experts_implementation="eager").eval()
        _fill(plain, of)
        with torch.no_grad():
            return plain(torch.tensor(texts)).logits

    original = {name: reader.get(name) for name in reader.names}
    exact = logits(original)
    with torch.no_grad():
        own = model(torch.tensor(texts)).logits  # the tool's model holds the quantized weights
    unpacked = {name: _unpacked(quantised[name]) for name in quantised}
    assert torch.allclose(logits(original | unpacked), own, atol=1e-4)
    nearest = {}
    for name in quantised:
        words, scale = quantize_int4(original[name], 8)
        nearest[name] = _unpacked([words, scale, torch.tensor(original[name].shape)])
    by_rounding = (logits(original | nearest) - exact).square().mean()
    assert (own - exact).square().mean() < 0.8 * by_rounding


def _unpacked(stored: list[torch.Tensor]) -> torch.Tensor:
    words, scale, shape = stored
    nibbles = torch.stack([words >> 4 * k & 15 for k in range(8)], dim=-1).flatten(1)[:, : int(shape[1])]
    return (nibbles - 8) * scale.float().repeat_interleave(int(shape[1]) // scale.shape[1], 1)


def _fill(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """By the checkpoint's names, of which transformers stacks those of experts."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in own:
                own[name].copy_(tensor)
                continue
            module, number, part = name.removesuffix(".weight").rsplit(".", 2)
            if part == "down_proj":
                own[f"{module}.down_proj"][int(number)].copy_(tensor)
            else:
                halves = own[f"{module}.gate_up_proj"][int(number)].chunk(2)
                halves[part == "up_proj"].copy_(tensor)
