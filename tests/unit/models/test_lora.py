"""The linear layers of every family that adapters name, against the tensors of checkpoints that transformers writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.models.hf_shape import read_shape
from slime.models.lora import LoraConfig, linears, tensor_name
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_families import KINDS, is_left_out, make_family_checkpoint, saved_tensors

_DECODER_LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "proj_with_mqa.weight")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            make_family_checkpoint(kind, made.setdefault(kind, tmp_path_factory.mktemp(kind)))
        return made[kind]

    return get


def _shape(path: Path) -> ModelShape:
    return read_shape(str(path))


def _is_linear(name: str, shape: ModelShape) -> bool:
    is_stack = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    is_matrix = name.endswith(_DECODER_LINEAR) or ".in_proj_" in name
    return not is_left_out(name, shape.model_type) and (is_stack or (is_matrix and "indexer" not in name))


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_of_a_checkpoint_is_known_with_its_size(kind: str, model: Any) -> None:
    shape = _shape(model(kind))
    tensors = {name: tuple(value.shape) for name, value in saved_tensors(model(kind)).items()}
    expected = {name: sizes for name, sizes in tensors.items() if _is_linear(name, shape)}
    found: dict[str, tuple[int, ...]] = {}
    for linear in linears(shape):
        for layer in linear.layers:
            stacked = linear.rule.stacked
            if stacked is not None and stacked.format(layer=layer) in expected:
                rows = sum(one.rows for one in linears(shape) if one.rule is linear.rule)
                found[stacked.format(layer=layer)] = (linear.copies, rows, linear.columns)
                continue
            for expert in range(linear.copies):
                name = linear.rule.hf[linear.part].format(layer=layer, expert=expert)
                found[name] = (linear.rows, linear.columns)
    assert found == expected


def test_names_match_as_in_peft_and_the_rest_of_a_fused_layer_stays(model: Any) -> None:
    shape = _shape(model("deepseek_v3"))
    config = LoraConfig(4, target_modules=("kv_b_proj", "shared_experts.up_proj"))
    assert [linear.path for linear in config.targets(shape)] == ["self_attn.kv_b_proj", "mlp.shared_experts.up_proj"]
    assert config.module_names(shape) == ["kv_b_proj", "up_proj"]


def test_all_linear_takes_the_mlps_of_a_model_with_experts_only_with_the_flag(model: Any) -> None:
    shape = _shape(model("qwen3_moe"))
    config = LoraConfig(4)
    assert config.module_names(shape) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    everything = dataclasses.replace(config, experts=True)
    assert everything.module_names(shape) == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    experts = [linear for linear in everything.targets(shape) if linear.rule.is_expert]
    assert {linear.copies for linear in experts} == {8}
    assert everything.num_parameters(shape) - config.num_parameters(shape) == sum(
        linear.num_parameters(4) for linear in everything.targets(shape) if ".mlp." in linear.rule.megatron
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ("q_porj",)}, "--lora-target-modules q_porj matches no linear layer of model_type qwen3"),
        ({"target_modules": ("down_proj", "experts.3.down_proj")}, "experts.3.down_proj matches no linear layer"),
        ({"rank": 33}, r"--lora-rank 33 is larger than a dimension of self_attn.q_proj \[64, 32\]"),
    ],
)
def test_settings_that_fit_no_layer_are_refused(settings: dict[str, Any], message: str, model: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**{"rank": 4, **settings}).targets(_shape(model("qwen3")))


def test_experts_without_their_flag_are_refused_with_the_flag_that_is_missing(model: Any) -> None:
    with pytest.raises(ConfigError, match="names routed experts: add --lora-experts"):
        LoraConfig(4, target_modules=("w1",)).targets(_shape(model("minimax_m2")))


def test_the_file_for_peft_is_read_by_peft_with_the_same_scale(model: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = LoraConfig(4, alpha=6.0, rslora=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config.peft_config(_shape(model("qwen3")), "tiny")))
    theirs = peft.LoraConfig.from_pretrained(str(tmp_path))
    layer = peft.tuners.lora.Linear(torch.nn.Linear(8, 8), "default", config=theirs, r=4, lora_alpha=6)
    assert layer.scaling["default"] == config.scale == 3.0
    assert LoraConfig(4, alpha=6.0).scale == 1.5


def test_without_a_rank_there_are_no_adapters() -> None:
    assert LoraConfig.of({}) is None
    assert LoraConfig.of({"lora_rank": 0}) is None
    assert tensor_name("a.q_proj.weight", "B") == "a.q_proj.lora_B.weight"


@pytest.mark.parametrize(("kind", "tensor_ranks"), [("qwen3", 2), ("deepseek_v3", 1), ("qwen3_moe", 2)])
def test_numbers_on_a_rank_add_up_to_the_adapters(kind: str, tensor_ranks: int, model: Any) -> None:
    shape, config = _shape(model(kind)), LoraConfig(4, experts=True)
    stages = [range(1), range(1, shape.num_layers)]
    sizes = {"tensor_ranks": tensor_ranks, "expert_ranks": 2}
    on_rank = [config.numbers_on_rank(shape, layers, **sizes) for layers in stages]
    whole = list(config.targets(shape))
    experts = sum(linear.num_parameters(4) for linear in whole if linear.rule.is_expert)
    assert sum(expert for _, expert in on_rank) * 2 == experts
    copied = {"column": "columns", "row": "rows"}  # of these every tensor rank has all
    others = sum(
        4 * len(linear.layers) * getattr(linear, copied[linear.rule.split])
        for linear in whole
        if linear.rule.split in copied and not linear.rule.is_expert
    )
    total = config.num_parameters(shape) - experts
    assert sum(other for other, _ in on_rank) * tensor_ranks == total + (tensor_ranks - 1) * others
