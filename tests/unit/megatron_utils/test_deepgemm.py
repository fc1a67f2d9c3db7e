"""--megatron-deepgemm-*: products of the package deep_gemm, here a fake of plain products, against usual layers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import precision
from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.megatron_utils.model.experts import multiply
from slime.backends.megatron_utils.optimizer_rules import low_precision_here
from slime.utils import accelerator
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.command_lines import problems_of, resolved, write_config
from tests.unit.megatron_utils.fake_deep_gemm import make_package
from tests.unit.megatron_utils.hub_models import QWEN3_4B
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = make_package()
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


pytestmark = pytest.mark.usefixtures("trainer_rank")


def _rounded(tensor: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """A tensor rounded to 8 bits, block by block."""
    result = torch.empty_like(tensor)
    for row in range(0, tensor.shape[0], block[0]):
        for column in range(0, tensor.shape[1], block[1]):
            where = (slice(row, row + block[0]), slice(column, column + block[1]))
            scale = tensor[where].abs().max() / 448
            result[where] = (tensor[where] / scale).to(torch.float8_e4m3fn).float() * scale
    return result


@pytest.mark.parametrize("has_8_bits", [False, True])
@pytest.mark.parametrize("counts", [(5,), (3, 0, 9, 1), (0, 0)])
def test_rows_are_multiplied_with_the_weight_of_their_expert_and_gradients_are_the_usual_ones(
    counts: tuple[int, ...], has_8_bits: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(sum(counts), 256, generator=generator, requires_grad=True)
    stack = torch.randn(len(counts) * 192, 256, generator=generator, requires_grad=True)
    weights = stack.chunk(len(counts))
    gradient = torch.randn(sum(counts), 192, generator=generator)
    usual = torch.cat([part @ w.t() for part, w in zip(tokens.split(counts), weights, strict=True)])
    expected = torch.autograd.grad(usual, [tokens, stack], gradient)
    ends = torch.tensor(counts).cumsum(0).int()
    out = multiply(tokens, stack, ends, product=precision.Products(has_8_bits).of_many)
    if has_8_bits and sum(counts):
        parts = _rounded(tokens.detach(), (1, 128)).split(counts)
        usual = torch.cat([p @ _rounded(w.detach(), (128, 128)).t() for p, w in zip(parts, weights, strict=True)])
    torch.testing.assert_close(out, usual, rtol=1e-5, atol=1e-3)
    for ours, theirs in zip(torch.autograd.grad(out, [tokens, stack], gradient), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def _step(path: Path, **overrides: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    trainer = MegatronTrainer(make_args(path, lr=1e-2, **overrides), rank=0, world_size=1, with_ref=False)
    trainer.setup()
    (step,) = trainer.train(0, make_batch()).steps
    return step, {name: value.clone() for name, value in trainer.export_weights()}


@pytest.mark.parametrize(("kind", "experts"), [("qwen3_moe", 0), ("deepseek_v3", 1)])
def test_a_model_learns_as_with_its_usual_products(
    kind: str, experts: int, package: ModuleType, tmp_path: Path
) -> None:
    make_family_checkpoint(kind, tmp_path)
    usual, expected = _step(tmp_path)
    assert package.calls == []
    chosen = {"megatron_deepgemm_forward_layers": [0, 1], "megatron_deepgemm_moe_forward_layers": [experts]}
    step, weights = _step(tmp_path, **chosen)
    assert set(package.calls) == {"bf16_gemm_nt", "m_grouped_bf16_gemm_nt_contiguous"}
    assert step == pytest.approx(usual, rel=1e-4, abs=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-4, msg=name)


def _installed(path: Path, **overrides: Any) -> list[str]:
    from slime.backends.megatron_utils.alignment.deepgemm_moe_forward import enable_deepgemm_moe_forward
    from slime.backends.megatron_utils.arguments import PluginArgs
    from slime.backends.megatron_utils.precision import install_deepgemm
    from slime.config.groups import from_args

    args = make_args(path)
    trainer = MegatronTrainer(args, rank=0, world_size=1, with_ref=False)
    trainer.setup()
    vars(args).update(overrides)
    enable_deepgemm_moe_forward(args, trainer._ready.chunks, "")  # as a hook, before the same once more
    return install_deepgemm(trainer._ready.chunks, from_args(PluginArgs, args), str(path))


def test_layers_and_modules_are_chosen_by_number_and_by_the_end_of_their_name(tmp_path: Path) -> None:
    make_family_checkpoint("qwen3_moe", tmp_path)  # layer 1 is dense
    attention = ["self_attention.linear_proj", "self_attention.linear_qkv"]
    assert _installed(tmp_path, megatron_deepgemm_forward_layers=[1]) == [
        *(f"1.{name}" for name in attention),
        "1.mlp.linear_fc1",
        "1.mlp.linear_fc2",
    ]
    chosen = {"megatron_deepgemm_forward_layers": [0], "megatron_deepgemm_forward_modules": ["linear_proj"]}
    assert _installed(tmp_path, **chosen) == ["0.self_attention.linear_proj"]
    assert _installed(tmp_path, megatron_deepgemm_moe_forward_layers=[0]) == ["0.mlp.experts"]
    for overrides, message in (
        ({"megatron_deepgemm_moe_forward_layers": [1]}, "moe-forward-layers 1: no such layer has such modules"),
        (
            chosen | {"megatron_deepgemm_forward_modules": ["fc3"]},
            "forward-modules fc3 finds no module in these layers",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            _installed(tmp_path, **overrides)


def test_the_product_is_the_one_of_engines_that_load_the_checkpoint(tmp_path: Path) -> None:
    make_family_checkpoint("qwen3_moe", tmp_path)
    assert precision.products_of(str(tmp_path)) == precision.Products()
    config = json.loads((tmp_path / "config.json").read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": blocks}))
    assert precision.products_of(str(tmp_path)) == precision.Products(True, has_power_of_two_scales=True)
    with pytest.raises(
        ConfigError, match=r"deep_gemm cannot multiply with 0.self_attention.linear_proj, of which a rank"
    ):
        _installed(tmp_path, megatron_deepgemm_forward_layers=[0])  # a tiny model's sizes
    by_rows = {"quant_method": "compressed-tensors"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": by_rows}))
    with pytest.raises(ConfigError, match="is quantized as compressed-tensors"):
        precision.products_of(str(tmp_path))


def test_the_flags_ask_for_a_gpu_and_then_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = write_config(tmp_path / "hf", QWEN3_4B)
    words = ["--megatron-deepgemm-forward-layers", "0", "35"]
    assert problems_of(hf, words) == []
    args = resolved(hf, words)
    (problem,) = low_precision_here(args)
    assert problem.startswith(
        "--megatron-deepgemm-forward-layers needs a GPU of compute capability 9.0 or more; this machine has none"
    )
    monkeypatch.setattr(accelerator, "current", lambda: SimpleNamespace(is_cpu=False))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = low_precision_here(args)
    assert "needs the package deep_gemm, which is not installed: pip install sgl-deep-gemm" in problem
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert list(low_precision_here(args)) == []
    for more, message in (
        (["36"], "layers 36 must be a layer of the model, from 0 to 35"),
        (["--fp16"], "is for weights in bf16"),
        (["--fp8-format", "e4m3"], "exclude each other"),
        (
            ["--megatron-deepgemm-moe-forward-modules", "x"],
            "moe-forward-modules x needs --megatron-deepgemm-moe-forward-",
        ),
    ):
        (problem,) = problems_of(hf, [*words, *more])
        assert message in problem
