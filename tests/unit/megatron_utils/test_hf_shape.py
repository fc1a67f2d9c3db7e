"""The meaning of config.json: released models, both generations of transformers, and refused files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.models.config_json import read_model_config
from slime.models.family import NOT_BUILT, families
from slime.models.hf_shape import read_shape, shape_from_config
from slime.models.shape import ModelShape
from slime.ray.arguments import parse_only
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.command_lines import problems_of, resolved, write_config
from tests.unit.megatron_utils.hub_hybrid import QWEN3_NEXT_80B, QWEN35_4B, QWEN35_35B
from tests.unit.megatron_utils.hub_models import (
    DEEPSEEK_V3,
    GLM4_9B,
    GLM45,
    GLM45_AIR,
    HUB_MODELS,
    KIMI_K2,
    LLAMA31_8B,
    MIMO_7B,
    MOONLIGHT,
    QWEN3_4B,
    QWEN3_30B,
    QWEN25_05B,
)
from tests.unit.scripts.bash_arrays import model_words


def _shape(config: dict[str, Any]) -> ModelShape:
    return shape_from_config(config, "hub")


@pytest.mark.parametrize("preset", HUB_MODELS)
def test_a_preset_and_the_released_model_agree(preset: str, tmp_path: Path) -> None:
    hf = write_config(tmp_path, HUB_MODELS[preset])
    assert problems_of(hf, model_words()[preset]) == []


@pytest.mark.parametrize("preset", HUB_MODELS)
def test_leaving_out_every_model_flag_gives_what_the_preset_says(preset: str, tmp_path: Path) -> None:
    hf = write_config(tmp_path, HUB_MODELS[preset])
    given, derived = resolved(hf, model_words()[preset]), resolved(hf, [])
    # set by a preset for Megatron's kernels and for its training, not for the model's shape
    free = {
        "given",
        "notices",
        "spec",
        "attention_softmax_in_fp32",
        "apply_rope_fusion",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "masked_softmax_fusion",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_router_dtype",
        "seq_length",
        "make_vocab_size_divisible_by",
        "mtp_num_layers",
        "use_rotary_position_embeddings",
        "enable_experimental",
        "allgather_cp",
        "rotary_scaling_factor",
    }
    if "--multi-latent-attention" in model_words()[preset]:
        free |= {"kv_channels", "moe_router_num_groups", "moe_router_group_topk", "mscale_all_dim", "add_qkv_bias"}
    different = {
        name: (value, getattr(derived, name))
        for name, value in vars(given).items()
        if name not in free and value != getattr(derived, name)
    }
    assert different in ({}, {"moe_router_topk_scaling_factor": (None, 1.0)})


def test_every_family_that_can_be_built_has_a_released_model_here() -> None:
    without_preset = {"qwen2_moe", "deepseek_v32"}
    assert {config["model_type"] for config in HUB_MODELS.values()} == set(families()) - without_preset


def test_a_head_may_be_wider_than_its_share_of_the_model() -> None:
    assert (_shape(QWEN3_4B).head_dim, _shape(QWEN25_05B).head_dim) == (128, 64)
    assert _shape(LLAMA31_8B).head_dim == 128


def test_a_null_rank_means_that_queries_are_not_compressed_and_no_rank_means_the_familys() -> None:
    moonlight, deepseek = _shape(MOONLIGHT).mla, _shape(DEEPSEEK_V3 | {"q_lora_rank": 1024}).mla
    assert moonlight is not None
    assert deepseek is not None
    assert (moonlight.q_lora_rank, deepseek.q_lora_rank) == (None, 1024)
    without = {name: value for name, value in DEEPSEEK_V3.items() if name != "q_lora_rank"}
    family = _shape(without).mla
    assert family is not None
    assert family.q_lora_rank == 1536


def test_dense_layers_come_first_or_where_the_list_says() -> None:
    deepseek, glm = _shape(DEEPSEEK_V3).moe, _shape(GLM45).moe
    assert deepseek is not None
    assert deepseek.layers == (False,) * 3 + (True,) * 58
    assert glm is not None
    assert sum(glm.layers) == 89
    qwen = _shape(QWEN3_30B | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}).moe
    assert qwen is not None
    assert qwen.layers == (False, True, False, False, False, True)


def test_one_group_of_experts_is_no_group() -> None:
    kimi, deepseek = _shape(KIMI_K2).moe, _shape(DEEPSEEK_V3).moe
    assert kimi is not None
    assert deepseek is not None
    assert (kimi.num_groups, kimi.group_topk) == (None, None)
    assert (deepseek.num_groups, deepseek.group_topk) == (8, 4)


def test_both_spellings_of_the_number_of_experts_are_read() -> None:
    new = {**QWEN3_30B, "num_local_experts": 16}
    del new["num_experts"]
    moe = _shape(new).moe
    assert moe is not None
    assert moe.num_experts == 16


def test_rope_settings_of_both_transformers_generations_are_read() -> None:
    factors = LLAMA31_8B["rope_scaling"]
    new = {name: value for name, value in LLAMA31_8B.items() if name not in ("rope_scaling", "rope_theta")}
    assert _shape(new | {"rope_parameters": factors | {"rope_theta": 500000.0}}) == _shape(LLAMA31_8B)
    glm = {name: value for name, value in GLM4_9B.items() if name not in ("partial_rotary_factor", "rope_theta")}
    inside = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert _shape(glm | {"rope_parameters": inside}) == _shape(GLM4_9B)


def test_prediction_layers_are_counted_under_either_name() -> None:
    assert _shape(MIMO_7B).num_mtp_layers == 1
    assert _shape(QWEN3_4B).num_mtp_layers == 0
    assert _shape(QWEN3_4B | {"num_mtp_layers": 2}).num_mtp_layers == 2


def test_the_text_part_of_a_config_counts() -> None:
    assert _shape({"model_type": "qwen3", "text_config": QWEN3_4B}) == _shape(QWEN3_4B)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (QWEN3_4B, {"model_type": "mamba"}, r"model_type 'mamba'.*it is unknown; supported are .*qwen3"),
        (QWEN3_4B, {"model_type": None}, "model_type None"),
        (QWEN3_4B, {"attention_bias": True}, "attention_bias True: biases in attention are not supported"),
        (QWEN3_4B, {"use_sliding_window": True}, "sliding-window attention are not supported"),
        (QWEN3_4B, {"hidden_act": "gelu"}, "hidden_act 'gelu'; only silu"),
        (QWEN3_4B, {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 5}}, "'yarn'"),
        (QWEN3_4B, {"hidden_size": None}, "lacks hidden_size"),
        (QWEN3_4B, {"hidden_size": "4k"}, "has hidden_size '4k'; it must be a number"),
        (QWEN3_4B, {"num_hidden_layers": 2.5}, "has num_hidden_layers 2.5; it must be a whole number"),
        (LLAMA31_8B, {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks low_freq_factor of its rope"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'; only sigmoid"),
        (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob false"),
        (DEEPSEEK_V3, {"topk_group": 3}, "topk_group 3 with n_group 8"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave false"),
        (GLM45_AIR, {"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        (QWEN3_30B, {"num_experts": None}, "lacks n_routed_experts"),
    ],
)
def test_what_is_not_supported_is_said_before_anything_starts(
    base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _shape(base | change)


def test_all_that_is_wrong_with_a_config_is_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        _shape(QWEN3_4B | {"hidden_act": "gelu", "use_sliding_window": True, "vocab_size": None, "rms_norm_eps": "x"})
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("model_type", NOT_BUILT)
def test_a_family_that_launch_scripts_exist_for_says_what_it_lacks(model_type: str) -> None:
    with pytest.raises(ConfigError, match=NOT_BUILT[model_type]):
        _shape(QWEN3_4B | {"model_type": model_type})


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not valid JSON"), ("[]", "does not hold a JSON object"), (None, "cannot read")]
)
def test_a_config_that_cannot_be_read_is_a_config_error(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_shape(str(tmp_path))


def test_layers_without_full_attention_are_listed_or_follow_from_the_interval() -> None:
    listed = _shape(QWEN35_35B)
    by_interval = _shape(QWEN3_NEXT_80B)
    for shape, num_layers in ((listed, 40), (by_interval, 48)):
        assert shape.delta_net is not None
        assert shape.delta_net.layers == (True, True, True, False) * (num_layers // 4)
        assert (shape.delta_net.num_key_heads, shape.delta_net.num_value_heads) == (16, 32)
        assert shape.rotary_percent == 0.25
        assert shape.num_mtp_layers == 1
        assert shape.moe is not None
        assert (shape.moe.shared_size, shape.moe.has_shared_gate, shape.moe.pre_softmax) == (512, True, False)


def test_a_multimodal_config_may_say_outside_of_its_text_that_the_head_is_tied() -> None:
    assert _shape(QWEN35_4B).is_tied
    assert not _shape(QWEN35_35B).is_tied
    assert _shape(QWEN35_4B).moe is None


@pytest.mark.parametrize(
    ("base", "change", "problem"),
    [
        (QWEN3_4B, {"num_hidden_layers": 0}, "has num_hidden_layers 0; it must be a whole number from 1 to 10000"),
        (QWEN3_4B, {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
        (QWEN3_4B, {"num_key_value_heads": 3}, "num_attention_heads 32 and num_key_value_heads 3"),
        (QWEN3_4B, {"vocab_size": 0}, "has vocab_size 0"),
        (QWEN3_4B, {"vocab_size": 10**400}, "has a vocab_size beyond"),
        (QWEN3_4B, {"head_dim": 7}, "head_dim 7, of which rope turns 1: that must be an even number"),
        (QWEN3_4B, {"head_dim": 0}, "has head_dim 0"),
        (QWEN3_4B, {"rms_norm_eps": 0}, "rms_norm_eps 0; it must be above 0"),
        (QWEN3_4B, {"rope_theta": float("inf")}, "has a rope_theta beyond"),
        (QWEN3_4B, {"rope_scaling": {"partial_rotary_factor": "x"}}, "partial_rotary_factor 'x'; it must be a number"),
        (QWEN3_4B, {"architectures": ["LlamaForCausalLM"]}, "they name different models"),
        (QWEN3_4B, {"architectures": "Qwen3ForCausalLM"}, "it must be a list of names"),
        (QWEN3_30B, {"num_experts_per_tok": 129}, "num_experts_per_tok 129, but only 128 experts"),
        (QWEN3_30B, {"num_experts": 0}, "has num_experts 0"),
        (QWEN3_30B, {"mlp_only_layers": 5}, "mlp_only_layers 5; it must be a list"),
        (DEEPSEEK_V3, {"n_group": 7, "topk_group": 4}, "256 experts, which n_group 7 must divide"),
        (QWEN3_NEXT_80B, {"linear_num_value_heads": 33}, "must be a multiple of linear_num_key_heads 16"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) and len(value) < 5 else "",
)
def test_numbers_that_make_no_model_are_refused(base: dict[str, Any], change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        _shape(base | change)
    assert problem in str(error.value)


def test_the_class_of_a_released_model_fits_its_family() -> None:
    for config, name in (
        (KIMI_K2, "DeepseekV3ForCausalLM"),
        (MOONLIGHT, "DeepseekV3ForCausalLM"),
        (QWEN35_4B, "Qwen3_5ForConditionalGeneration"),
        (MIMO_7B, "MiMoForCausalLM"),
        (GLM45, "Glm4MoeForCausalLM"),
    ):
        assert _shape(config | {"architectures": [name]}).num_layers > 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"model_type": "qwen3", "rope_theta": NaN}', "it holds NaN, which is no JSON number"),
        ('{"model_type": "qwen3", "quantization_config": "fp8"}', "has quantization_config 'fp8'; it must be a JSON"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "is nested too deeply to be read"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "config.json is not valid JSON"),
        ("[1]", "does not hold a JSON object"),
    ],
    ids=["NaN", "text for a section", "depth", "digits", "list"],
)
def test_a_file_that_cannot_be_read_is_a_problem_of_the_command(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    _, problems = parse_only(["--hf-checkpoint", str(tmp_path), "--rm-type", "math"])
    assert [one for one in problems if problem in one and str(tmp_path) in one]
    assert read_model_config(str(tmp_path)) == {}
