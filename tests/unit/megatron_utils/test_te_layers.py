"""Layers of Transformer Engine: names, results and checkpoints are those of local layers, for every family.

Megatron's wrappers are the real ones. The kernels under them are torch's, as the package needs CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights, load_weights
from slime.backends.megatron_utils.checkpoint.tensors import ModelTensors
from slime.backends.megatron_utils.conversion import convert_to_hf
from slime.backends.megatron_utils.model.build import global_names
from slime.doctor import gpu_training
from slime.models.family import local_name
from tests.unit.megatron_utils import fake_transformer_engine as fake
from tests.unit.megatron_utils.fake_transformer_engine import fake_transformer_engine
from tests.unit.megatron_utils.family_models import build_family_model, shape_of
from tests.unit.megatron_utils.tiny_families import KINDS, make_family_checkpoint, packed_logits
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_args, make_batch

TE = {"transformer_impl": "transformer_engine"}


@pytest.fixture
def wrappers() -> Iterator[ModuleType]:
    with fake_transformer_engine() as module:
        yield module


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in (9, 1, 40)]


def both_models(path: Path, **settings: Any) -> tuple[Any, Any]:
    models = (build_family_model(path, **settings), build_family_model(path, **TE, **settings))
    for model in models:
        load_weights(model, shape_of(path), str(path), "--hf-checkpoint")
    return models


def places(path: Path, model: Any) -> dict[Any, tuple[Any, ...]]:
    shape = shape_of(path)
    tensors = ModelTensors(model, shape.family, shape.vocab_size, shape.is_tied)
    return {
        place: (local_name(one.name), one.value.shape, one.value.dtype, vars(one.owner).get("sequence_parallel", False))
        for place, one in tensors.local.items()
    }


@pytest.mark.usefixtures("megatron_groups", "wrappers")
@pytest.mark.parametrize(("kind", "mtp_layers"), [*((kind, None) for kind in KINDS), ("mimo", 1), ("glm4_moe_lite", 1)])
def test_names_map_one_to_one_to_local_ones_and_logits_are_equal(
    kind: str, mtp_layers: int | None, tmp_path: Path
) -> None:
    make_family_checkpoint(kind, tmp_path)
    local, engine = both_models(tmp_path, mtp_num_layers=mtp_layers)
    names = [name for name, _ in engine.named_parameters()]
    assert any(".linear_fc1.layer_norm_weight" in name or ".experts.linear_fc1.weight0" in name for name in names)
    assert len({local_name(name) for name in names}) == len(names)
    assert places(tmp_path, engine) == places(tmp_path, local)
    exported, expected = (dict(export_weights(model, shape_of(tmp_path))) for model in (engine, local))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in exported.items())
    with torch.no_grad():
        difference = packed_logits(engine, sequences()) - packed_logits(local, sequences())
    assert difference.abs().max() < 1e-5


def kinds_of(model: Any) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


@pytest.mark.usefixtures("megatron_groups", "wrappers")
@pytest.mark.parametrize(
    ("kind", "settings", "is_exchanged"),
    [
        ("qwen3", {}, True),
        ("qwen3_moe", {}, True),
        ("deepseek_v3", {}, True),
        ("glm4_moe_lite", {}, True),
        ("qwen3", {"attention_backend": "fa3"}, False),
        ("qwen3", {"deterministic_mode": True}, False),
    ],
)
def test_attention_is_exchanged_in_16_bits(
    kind: str, settings: dict[str, Any], is_exchanged: bool, tmp_path: Path
) -> None:
    make_family_checkpoint(kind, tmp_path, dtype=torch.bfloat16)
    local, engine = both_models(tmp_path, **settings)
    assert ("TEDotProductAttention" in kinds_of(engine)) == is_exchanged
    assert ("PackedAttention" in kinds_of(engine)) != is_exchanged
    assert not {"ColumnParallelLinear"} & {
        type(module).__name__ for name, module in engine.named_modules() if ".layers." in name and "mtp" not in name
    }
    with torch.no_grad():
        ours, theirs = packed_logits(local, sequences()).float(), packed_logits(engine, sequences()).float()
    assert (ours - theirs).norm() < 1e-2 * ours.norm()


@pytest.mark.usefixtures("megatron_groups", "wrappers")
@pytest.mark.parametrize("kind", ["qwen3_next", "minimax_m2", "deepseek_v32"])
def test_layers_of_slime_stay_and_their_neighbors_are_exchanged(kind: str, tmp_path: Path) -> None:
    make_family_checkpoint(kind, tmp_path)
    kept = {"qwen3_next": "GatedDeltaNet", "minimax_m2": "JointHeadNorm", "deepseek_v32": "SparseAttention"}[kind]
    model = build_family_model(tmp_path, **TE)
    assert {kept, "TEGroupedMLP", "SortingDispatcher"} <= kinds_of(model) | {
        type(module.token_dispatcher).__name__ for module in model.modules() if hasattr(module, "token_dispatcher")
    }


def trained(path: Path, steps: int, **settings: Any) -> MegatronTrainer:
    trainer = MegatronTrainer(make_args(path, **settings), rank=0, world_size=1, with_ref=False)
    trainer.setup()
    for step in range(steps):
        trainer.train(step, make_batch(seed=step))
    return trainer


def weights_of(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.export_weights()}


@pytest.mark.usefixtures("megatron_groups", "wrappers")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3", "glm4"])
@pytest.mark.parametrize(("first", "second"), [({}, TE), (TE, {})])
def test_a_run_continues_with_the_other_layers(
    kind: str, first: dict[str, str], second: dict[str, str], tmp_path: Path
) -> None:
    model, saved = tmp_path / "model", str(tmp_path / "saved")
    make_family_checkpoint(kind, model)
    before = trained(model, 1, save=saved, **first)
    before.save(0)
    after = trained(model, 0, load=saved, **second)
    expected = weights_of(before)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(after).items())
    for trainer in (before, after):  # with the moments of the optimizer
        trainer.train(1, make_batch(seed=1))
    expected, found = weights_of(before), weights_of(after)
    assert max(float((value - expected[name]).abs().max()) for name, value in found.items()) < 1e-5


@pytest.mark.usefixtures("megatron_groups", "wrappers")
@pytest.mark.parametrize(("factor", "status"), [(1.0, "pass"), (1.5, "fail")])
def test_the_check_of_a_gpu_compares_both_kinds_of_layers(
    factor: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fake._normed
    monkeypatch.setattr(fake, "_normed", lambda *given: factor * right(*given))
    monkeypatch.setattr(gpu_training, "low_precision_here", lambda args: [])
    monkeypatch.setattr(gpu_training, "TINY_MODELS", {"moe": gpu_training.TINY_MODELS["moe"]})
    results = {result.check: result.status for result in gpu_training.transformer_engine(True)}
    assert results == {"transformer_engine.moe.step": status, "transformer_engine.moe.checkpoint": "pass"}


@pytest.mark.usefixtures("megatron_groups", "wrappers")
def test_patterns_of_flags_and_users_conversions_see_local_names(tmp_path: Path) -> None:
    make_family_checkpoint("qwen3_moe", tmp_path)
    local, engine = build_family_model(tmp_path), build_family_model(tmp_path, **TE)
    names = {name for name, _ in global_names(engine)}
    experts = {name for name in names if ".local_experts." in name}
    assert len(experts) == 2 * 2 * 8  # two layers of eight experts with two matrices
    assert names - experts == {name for name, _ in global_names(local) if ".experts." not in name}
    args, rows = make_args(tmp_path), torch.arange(48.0 * 32).view(48, 32)
    for given, expected in (
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "model.layers.0.input_layernorm.weight"),
        ("module.decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "model.layers.1.post_attention_layernorm.weight"),
        ("decoder.layers.2.mlp.experts.linear_fc1.weight5", "model.layers.2.mlp.experts.5.gate_proj.weight"),
    ):
        assert convert_to_hf(args, "", given, rows)[0][0] == expected


@pytest.mark.parametrize(
    "name", ["mlp.shared_experts.linear_fc1.weight", "mlp.linear_fc1.weight", "self_attention.q_layernorm.weight"]
)
def test_other_names_stay(name: str) -> None:
    assert local_name(f"decoder.layers.3.{name}") == f"decoder.layers.3.{name}"


@pytest.mark.usefixtures("megatron_groups", "wrappers")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_products_of_gradients_add_to_the_sum_of_all_micro_batches(kind: str, tmp_path: Path) -> None:
    make_family_checkpoint(kind, tmp_path)
    trainer = trained(tmp_path, 1, **TE)
    (chunk,) = trainer._ready.chunks
    added = {name for name, value in chunk.named_parameters() if value.grad_added_to_main_grad}
    matrices = {name for name, value in chunk.named_parameters() if ".linear_" in name and value.dim() == 2}
    assert added == matrices
    assert added
