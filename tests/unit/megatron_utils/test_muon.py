"""Muon against its paper: singular values, one update by hand, and who gets which optimizer in a trainer."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.megatron_utils.optimizer import Muon, orthogonalize, scale_of
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model

SETTINGS: dict[str, Any] = {
    "lr": 0.1,
    "momentum_beta": 0.9,
    "use_nesterov": False,
    "weight_decay": 0.5,
    "num_ns_steps": 5,
    "scale_mode": "spectral",
    "extra_scale_factor": 0.2,
    "split_qkv": True,
    "is_qkv_fn": lambda weight: hasattr(weight, "is_qkv"),
    "qkv_split_shapes": [4, 2, 2],
    "pg_collection": SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    "mode": "duplicated",
    "fp32_matmul_prec": "highest",
}


def by_singular_values(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The iteration on singular values, s <- 3.4445 s - 4.7750 s^3 + 2.0315 s^5. The vectors stay."""
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (u * values @ v).float()


@pytest.mark.parametrize("shape", [(12, 12), (8, 40), (40, 8), (1, 5)])
def test_the_iteration_does_to_singular_values_what_its_polynomial_says(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ours = orthogonalize(matrix, 5)
    torch.testing.assert_close(ours, by_singular_values(matrix, 5), rtol=0, atol=1e-5)
    values = torch.linalg.svdvals(orthogonalize(matrix, 8))
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("asked", ["medium", "highest"])
def test_a_cpu_multiplies_in_fp32_whatever_precision_is_asked_for(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN multiplies fp32 matrices in bf16 on a CPU with AMX if the precision is "medium"."""
    seen: list[str] = []

    def observed(matrix: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return matrix

    monkeypatch.setattr("slime.backends.megatron_utils.optimizer.orthogonalize", observed)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    Muon([weight], **SETTINGS | {"fp32_matmul_prec": asked}).step()
    assert seen == ["highest"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_two_updates_are_those_of_the_paper(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, first, second = (torch.randn(6, 10, generator=generator) for _ in range(3))
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = Muon([parameter], **SETTINGS | {"use_nesterov": nesterov})
    moment = torch.zeros(6, 10)
    for gradient in (first, second):
        parameter.grad = gradient.clone()
        optimizer.step()
        moment = 0.9 * moment + gradient
        direction = by_singular_values(gradient + 0.9 * moment if nesterov else moment, 5)
        weight = weight - 0.1 * (0.2 * math.sqrt(10) * direction + 0.5 * weight)
    torch.testing.assert_close(parameter.detach(), weight, rtol=0, atol=1e-5)


def test_queries_keys_and_values_are_three_matrices() -> None:
    gradient = torch.randn(16, 5, generator=torch.Generator().manual_seed(3))  # two key heads of 4 + 2 + 2 rows
    parameter = torch.nn.Parameter(torch.zeros(16, 5))
    parameter.is_qkv = True  # type: ignore[attr-defined]
    parameter.grad = gradient
    Muon([parameter], **SETTINGS).step()
    heads, moved = gradient.view(2, 8, 5), parameter.detach().view(2, 8, 5)
    for rows in (slice(0, 4), slice(4, 6), slice(6, 8)):
        part = heads[:, rows].reshape(-1, 5)
        expected = -0.1 * 0.2 * math.sqrt(max(part.shape)) * by_singular_values(part, 5)
        torch.testing.assert_close(moved[:, rows].reshape(-1, 5), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_experts_in_one_parameter_are_matrices_of_their_own(shape: tuple[int, int]) -> None:
    gradient = torch.randn(11 * shape[0], shape[1], generator=torch.Generator().manual_seed(5))
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    vars(parameter)["num_experts"] = 11  # more than are computed together
    parameter.grad = gradient
    Muon([parameter], **SETTINGS).step()
    for moved, part in zip(parameter.detach().chunk(11), gradient.chunk(11), strict=True):
        expected = -0.1 * 0.2 * math.sqrt(6) * by_singular_values(part, 5)
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-5)


def test_an_output_gate_is_a_matrix_of_its_own() -> None:
    # two key heads of 4 + 4 + 2 + 2 rows: 24 rows would also be three heads of 4 + 2 + 2
    gradient = torch.randn(24, 5, generator=torch.Generator().manual_seed(4))
    parameter = torch.nn.Parameter(torch.zeros(24, 5))
    parameter.is_qkv = True  # type: ignore[attr-defined]
    parameter.grad = gradient
    Muon([parameter], **SETTINGS, has_output_gate=True).step()
    heads, moved = gradient.view(2, 12, 5), parameter.detach().view(2, 12, 5)
    for rows in (slice(0, 4), slice(4, 8), slice(8, 10), slice(10, 12)):
        part = heads[:, rows].reshape(-1, 5)
        expected = -0.1 * 0.2 * math.sqrt(max(part.shape)) * by_singular_values(part, 5)
        torch.testing.assert_close(moved[:, rows].reshape(-1, 5), expected, rtol=0, atol=1e-5)


def test_the_factors_of_an_update_follow_the_shape() -> None:
    assert scale_of(4, 16, "spectral") == scale_of(16, 4, "spectral") == 4
    assert (scale_of(4, 16, "unit_rms_norm"), scale_of(16, 4, "unit_rms_norm")) == (0.5, 2)
    assert (scale_of(4, 16, "shape_scaling"), scale_of(16, 4, "shape_scaling")) == (1, 2)


# ---------------------------------------------------------------------------------------------- in a trainer


pytestmark = pytest.mark.usefixtures("trainer_rank")


def _moved(path: Path, **overrides: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(trainer, how far each weight moves in one step)."""
    settings = {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": False} | overrides
    trainer = MegatronTrainer(make_args(path, **settings), rank=0, world_size=1, with_ref=False)
    trainer.setup()
    before = {name: value.clone() for name, value in trainer.export_weights()}
    trainer.train(0, make_batch())
    return trainer, {name: value - before[name] for name, value in trainer.export_weights()}


def test_a_trainer_gives_matrices_to_muon_and_the_rest_to_adam(tmp_path: Path) -> None:
    make_hf_model("qwen3", tmp_path)
    _, adam = _moved(tmp_path)
    _, muon = _moved(tmp_path, optimizer="muon", muon_extra_scale_factor=0.2)
    for name, moved in muon.items():
        if "proj" not in name:
            assert torch.equal(moved, adam[name]), name
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        moved = muon[f"model.layers.1.{name}.weight"]
        values = torch.linalg.svdvals(moved) / (1e-2 * 0.2 * math.sqrt(max(moved.shape)))
        assert 0.5 < values.median() < values.max() < 1.3, name


@pytest.mark.parametrize("optimizer", ["muon", "dist_muon"])
def test_muon_without_a_matrix_to_train_says_what_to_do(optimizer: str, tmp_path: Path) -> None:
    make_hf_model("qwen3", tmp_path)
    with pytest.raises(
        ConfigError, match=f"--optimizer {optimizer} needs a weight of a linear layer.*--optimizer adam"
    ):
        _moved(tmp_path, optimizer=optimizer, fp32=False, only_train_params_name_list=["norm"])


def test_muon_knows_the_output_gate_of_a_hybrid_model(tmp_path: Path) -> None:
    make_family_checkpoint("qwen3_next", tmp_path)
    _, moved = _moved(tmp_path, optimizer="muon", muon_extra_scale_factor=0.2)
    # [heads, query | gate, head_dim] on the hub's side
    for part in moved["model.layers.1.self_attn.q_proj.weight"].view(4, 2, 16, -1).unbind(1):
        matrix = part.flatten(0, 1)
        values = torch.linalg.svdvals(matrix) / (1e-2 * 0.2 * math.sqrt(max(matrix.shape)))
        assert 0.5 < values.min() < values.max() < 1.3


def test_muon_knows_queries_and_experts_by_their_16_bit_weights_too(tmp_path: Path) -> None:
    make_hf_model("qwen3", tmp_path)
    trainer, _ = _moved(tmp_path, optimizer="muon", fp32=False)
    marked = [
        tuple(weight.shape)
        for part in trainer._ready.optimizer.chained_optimizers
        if isinstance(part.optimizer, Muon)
        for group in part.optimizer.param_groups
        for weight in group["params"]
        if hasattr(weight, "is_qkv")
    ]
    assert marked == [(128, 32)] * 2
