"""Parameter counts of the plan against the models of transformers, and against published figures."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.config.plan.placement import PlanError
from slime.config.plan.shape import read_shape
from slime.models.cost import flops_of_length, num_active, num_parameters, tower_parameters
from slime.models.shape import SparseShape

TINY: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GATED_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"model_type": "qwen2_moe", "head_dim": None, **GATED_EXPERTS},
    "qwen3_next": {"model_type": "qwen3_next", **DELTA_NET, **GATED_EXPERTS},
    "qwen2": {"model_type": "qwen2", "head_dim": None},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {"model_type": "llama"},
    "glm4": {"model_type": "glm4", "attention_bias": True, "pad_token_id": 0},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **EXPERTS,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        **EXPERTS,
        "q_lora_rank": 28,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": None,
    },
    "deepseek_v3 without query compression": {
        "model_type": "deepseek_v3",
        **LATENT,
        **EXPERTS,
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": None,
    },
}


def checkpoint(folder: Path, config: dict[str, Any]) -> Namespace:
    """Arguments that name a directory with ``config`` as its config.json."""
    kept = {key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}
    (folder / "config.json").write_text(json.dumps(kept))
    return Namespace(hf_checkpoint=str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_equals_that_of_the_model_in_transformers(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**TINY, **FAMILIES[family]}
    shape = read_shape(checkpoint(tmp_path, config))
    kept = {key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kept))
    assert num_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_next"])
def test_the_flops_of_a_sequence_are_those_of_the_products_that_transformers_makes(family: str, tmp_path: Path) -> None:
    """Only of the experts that a token is sent to. transformers computes masked pairs as well, so they count twice."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**TINY, **FAMILIES[family]} | ({"num_key_value_heads": 4} if "deepseek" in family else {})
    flops = flops_of_length(read_shape(checkpoint(tmp_path, config)))
    kept = {key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**kept), attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(101, (1, 64)), use_cache=False)
    pairs = (flops(128) - 2 * flops(64)) / 2  # twice the length has four times the pairs
    assert counter.get_total_flops() == pytest.approx(flops(64) + pairs, rel=5e-3)


def test_flops_of_a_linear_layer_grow_with_the_length_and_those_of_a_sparse_one_hardly_faster(tmp_path: Path) -> None:
    linear = {"layer_types": ["linear_attention"] * 3}
    config = {**TINY, **FAMILIES["qwen3_next"]}
    flops = flops_of_length(read_shape(checkpoint(tmp_path, config | linear)))
    assert flops(2000) == 2 * flops(1000)
    hybrid = flops_of_length(read_shape(checkpoint(tmp_path, config)))
    assert hybrid(2000) - 2 * hybrid(1000) == 2 * (4 * (16 + 16) * 1000**2)  # one layer, 4 heads of 16
    dense = read_shape(checkpoint(tmp_path, {**TINY, **FAMILIES["deepseek_v3"]}))
    sparse = SparseShape(num_heads=2, head_dim=8, topk=100, is_rope_interleaved=True, layers=(True, False, False))
    chosen = flops_of_length(replace(dense, sparse=sparse))
    assert chosen(100) > flops_of_length(dense)(100)
    per_pair, per_index = 2 * 3 * 4 * (12 + 8 + 10), 2 * 2 * 8
    assert chosen(2000) - 2 * chosen(1000) == per_pair * 5000 + per_index * 1000**2  # 5000: the first, masked keys


QWEN3_4B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(QWEN3_4B, 4.02, 4.02), (QWEN3_30B_A3B, 30.5, 3.3), (DEEPSEEK_V3, 671, 37)],
    ids=["Qwen3-4B", "Qwen3-30B-A3B", "DeepSeek-V3"],
)
def test_the_count_of_a_released_model_is_the_published_one(
    config: dict[str, Any], total: float, active: float, tmp_path: Path
) -> None:
    shape = read_shape(checkpoint(tmp_path, config))
    assert num_parameters(shape) / 1e9 == pytest.approx(total, rel=2e-3)
    assert num_active(shape) / 1e9 == pytest.approx(active, rel=2e-2)


def test_a_flag_beats_the_checkpoint(tmp_path: Path) -> None:
    args = checkpoint(tmp_path, QWEN3_4B)
    args.num_layers = 2
    assert read_shape(args).num_layers == 2


def test_flags_alone_describe_a_model() -> None:
    args = Namespace(num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=10)
    args.untie_embeddings_and_output_weights = True
    # two layers of attention 4 h h, gated MLP 3 h f and two norms, then embedding, head and the last norm
    assert num_parameters(read_shape(args)) == 2 * (4 * 64 + 3 * 8 * 16 + 2 * 8) + 2 * 10 * 8 + 8


def test_dense_layers_are_read_from_the_layer_pattern(tmp_path: Path) -> None:
    args = checkpoint(tmp_path, QWEN3_30B_A3B)
    args.moe_layer_freq = [0] * 47 + [1]
    shape = read_shape(args)
    assert shape.moe is not None
    assert sum(shape.moe.layers) == 1


def test_a_pattern_of_the_wrong_length_is_named(tmp_path: Path) -> None:
    args = checkpoint(tmp_path, QWEN3_30B_A3B)
    args.moe_layer_freq = [1]
    with pytest.raises(PlanError, match="describes 1 layers, the model has 48"):
        read_shape(args)


def test_an_unknown_shape_says_which_flags_would_give_it() -> None:
    with pytest.raises(PlanError, match="--num-layers"):
        read_shape(Namespace(hf_checkpoint=None))


def test_only_layers_of_full_attention_have_a_cache_of_keys_and_values(tmp_path: Path) -> None:
    """Every fourth layer of a hybrid model, as long as its config does not say otherwise."""
    text = {**QWEN3_4B, "tie_word_embeddings": None}
    shape = read_shape(
        checkpoint(tmp_path, {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text})
    )
    assert (shape.num_layers, shape.num_cached_layers) == (36, 9)
    assert shape.is_tied
    assert shape.family.has_output_gate


def test_prediction_layers_add_their_own_layer_and_no_second_embedding(tmp_path: Path) -> None:
    args = checkpoint(tmp_path, QWEN3_4B)
    before = read_shape(args)
    args.mtp_num_layers = 1
    layer = (num_parameters(before) - 151936 * 2560 - 2560) // 36
    assert num_parameters(read_shape(args)) - num_parameters(before) == layer + 2 * 2560 * 2560 + 3 * 2560


_SMALL = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 24}
_TEXT = {"num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 9}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3_vl_vision", {}),
        ("qwen3_vl_vision", _SMALL | {"deepstack_visual_indexes": [0, 2], "patch_size": 4}),
        ("qwen3_5_vision", {}),
        ("qwen3_5_moe_vision", _SMALL | {"spatial_merge_size": 1}),
    ],
)
def test_a_tower_has_as_many_parameters_as_transformers_builds(kind: str, config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        whole = AutoConfig.for_model(kind, **config)
        tower = AutoModel.from_config(whole)
    if kind == "qwen3_vl_vision":  # released checkpoints always name them
        config = {"deepstack_visual_indexes": list(whole.deepstack_visual_indexes)} | config
    assert tower_parameters(config) == sum(parameter.numel() for parameter in tower.parameters())


def test_a_tower_is_counted_if_the_run_builds_it(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_vl", "text_config": _TEXT, "vision_config": _SMALL}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = Namespace(hf_checkpoint=str(tmp_path), multimodal_keys={"image": "images"})
    named = Namespace(
        hf_checkpoint=str(tmp_path), spec=["slime_plugins.models.qwen3_vl", "get_qwen3_vl_model_provider"]
    )
    blind = Namespace(hf_checkpoint=str(tmp_path), multimodal_keys=None)
    assert num_parameters(read_shape(args)) == num_parameters(read_shape(named))
    assert num_parameters(read_shape(args)) - num_parameters(read_shape(blind)) == tower_parameters(_SMALL) > 0


def test_a_layer_pattern_counts_without_a_checkpoint() -> None:
    """The text of the flag, as a launch script passes it."""
    args = Namespace(num_layers=4, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=10)
    args.num_experts, args.moe_router_topk, args.moe_layer_freq = 4, 2, "[0]*1+[1]*3"
    shape = read_shape(args)
    assert shape.moe is not None
    assert shape.moe.layers == (False, True, True, True)
