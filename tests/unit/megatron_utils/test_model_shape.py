"""Model flags against config.json: omitted flags are derived, a contradiction is reported with both values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slime.models.shape import expand_layer_pattern
from tests.unit.megatron_utils.command_lines import problems_of, resolved, write_config
from tests.unit.megatron_utils.hub_models import (
    DEEPSEEK_V3,
    GLM45_AIR,
    LLAMA31_8B,
    MIMO_7B,
    QWEN3_4B,
    QWEN3_30B,
    QWEN25_05B,
)


@pytest.mark.parametrize(
    ("config", "words", "shown"),
    [
        (QWEN3_4B, "--num-layers 35", "num_hidden_layers 36"),
        (QWEN3_4B, "--hidden-size 2561", "hidden_size 2560"),
        (QWEN3_4B, "--ffn-hidden-size 9729", "intermediate_size 9728"),
        (QWEN3_4B, "--num-attention-heads 8", "num_attention_heads 32"),
        (QWEN3_4B, "--num-query-groups 4", "num_key_value_heads 8"),
        (QWEN3_4B, "--kv-channels 80", "head_dim 128"),
        (QWEN3_4B, "--vocab-size 151937", "vocab_size 151936"),
        (QWEN3_4B, "--norm-epsilon 1e-05", "rms_norm_eps 1e-06"),
        (QWEN3_4B, "--rotary-base 5000000", "rope_theta 1000000"),
        (QWEN3_4B, "--rotary-percent 0.5", "partial_rotary_factor 1.0"),
        (QWEN3_4B, "--normalization LayerNorm", "rms_norm_eps, which means RMSNorm"),
        (QWEN3_4B, "--position-embedding-type learned_absolute", "rope_theta, which means rope"),
        (LLAMA31_8B, "--rotary-scaling-factor 32.0", "rope scaling factor 8.0"),
        (LLAMA31_8B, "--rope-scaling-factor 32.0", "rope scaling factor 8.0"),
        (GLM45_AIR, "--rotary-percent 1.0", "partial_rotary_factor 0.5"),
        (QWEN3_30B, "--num-experts 64", "number of experts 128"),
        (QWEN3_30B, "--moe-ffn-hidden-size 1408", "moe_intermediate_size 768"),
        (QWEN3_30B, "--moe-router-topk 6", "num_experts_per_tok 8"),
        (QWEN3_30B, "--moe-router-score-function sigmoid", "scoring_func softmax"),
        (DEEPSEEK_V3, "--moe-shared-expert-intermediate-size 4096", "width of all shared experts together, 2048"),
        (DEEPSEEK_V3, "--moe-router-topk-scaling-factor 1.0", "routed_scaling_factor 2.5"),
        (DEEPSEEK_V3, "--moe-router-num-groups 4", "n_group 8"),
        (DEEPSEEK_V3, "--moe-router-group-topk 2", "topk_group 4"),
        (DEEPSEEK_V3, "--num-query-groups 8", "num_key_value_heads 128"),
        (DEEPSEEK_V3, "--q-lora-rank 1024", "q_lora_rank 1536"),
        (DEEPSEEK_V3, "--kv-lora-rank 256", "kv_lora_rank 512"),
        (DEEPSEEK_V3, "--qk-head-dim 64", "qk_nope_head_dim 128"),
        (DEEPSEEK_V3, "--qk-pos-emb-head-dim 32", "qk_rope_head_dim 64"),
        (DEEPSEEK_V3, "--v-head-dim 192", "v_head_dim 128"),
        (DEEPSEEK_V3, "--rotary-scaling-factor 32.0", "rope scaling factor 40.0"),
        (DEEPSEEK_V3, "--mscale 0.7", "mscale 1.0"),
        (DEEPSEEK_V3, "--mscale-all-dim 0.5", "mscale_all_dim 1.0"),
        (DEEPSEEK_V3, "--rope-type rope", "rope_type yarn"),
    ],
)
def test_a_contradicting_value_is_named_with_the_config_field_and_its_value(
    config: dict[str, Any], words: str, shown: str, tmp_path: Path
) -> None:
    hf = write_config(tmp_path, config)
    assert problems_of(hf, words.split()) == [
        f"{words} differs from {shown} in config.json of --hf-checkpoint {hf}: drop the flag."
    ]


@pytest.mark.parametrize(
    ("config", "flag", "absence"),
    [
        (QWEN25_05B, "--qk-layernorm", "queries and keys have no norm"),
        (QWEN3_4B, "--add-qkv-bias", "have no bias"),
        (QWEN3_4B, "--untie-embeddings-and-output-weights", "tie_word_embeddings is true"),
        (QWEN3_4B, "--use-rope-scaling", "no llama3 rope scaling"),
        (QWEN3_4B, "--rotary-interleaved", "rotates halves"),
        (QWEN3_4B, "--multi-latent-attention", "no multi-latent attention"),
        (QWEN3_4B, "--post-self-attn-layernorm", "no norm after attention"),
        (QWEN3_4B, "--post-mlp-layernorm", "no norm after the MLP"),
        (QWEN3_4B, "--apply-layernorm-1p", "not stored around zero"),
        (QWEN3_4B, "--attention-output-gate", "has no gate"),
        (QWEN3_4B, "--use-gated-attention", "has no gate"),
        (QWEN3_30B, "--moe-router-pre-softmax", "norm_topk_prob is true"),
        (QWEN3_30B, "--moe-router-enable-expert-bias", "router has no bias"),
        (QWEN3_30B, "--moe-shared-expert-gate", "shared experts have no gate"),
        (DEEPSEEK_V3, "--group-query-attention", "multi-latent attention"),
        (GLM45_AIR, "--qk-layernorm", "queries and keys have no norm"),
    ],
)
def test_a_switch_for_something_that_the_model_lacks_is_named(
    config: dict[str, Any], flag: str, absence: str, tmp_path: Path
) -> None:
    (problem,) = problems_of(write_config(tmp_path, config), [flag])
    assert problem.startswith(f"{flag} differs from model_type {config['model_type']} in config.json")
    assert absence in problem


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (QWEN3_4B, "--num-experts 8", "--num-experts 8 is for experts, but model_type qwen3"),
        (QWEN3_4B, "--kv-lora-rank 512", "--kv-lora-rank 512 is for multi-latent attention"),
        (QWEN3_4B, "--moe-layer-freq [1]*36", "--moe-layer-freq is for experts"),
        (QWEN3_30B, "--moe-shared-expert-intermediate-size 768", "is not used, but model_type qwen3_moe"),
        (DEEPSEEK_V3, "--moe-layer-freq [1]*61", "says 1 for layer 0, which is dense"),
        (DEEPSEEK_V3, "--moe-layer-freq [0]*3+[1]*57", "has 60 entries, but the model of .* has 61 layers"),
        (DEEPSEEK_V3, "--moe-layer-freq __import__('os')", "must be a whole number above 0 or a list of 0 and 1"),
        (MIMO_7B, "--mtp-num-layers 2", "has 1 such layers"),
        (QWEN3_4B, "--mtp-num-layers 1", "has no such layers"),
        (QWEN3_4B, "--padded-vocab-size 151000", "must be at least the 151936 tokens"),
        (QWEN3_4B, "--make-vocab-size-divisible-by 0 --padded-vocab-size 151936", "must be at least 1"),
    ],
)
def test_flags_of_another_kind_of_model_are_named(
    config: dict[str, Any], words: str, message: str, tmp_path: Path
) -> None:
    (problem,) = problems_of(write_config(tmp_path, config), words.split())
    assert re.search(message, problem)


def test_every_contradiction_is_reported_at_once(tmp_path: Path) -> None:
    words = "--num-layers 9 --add-qkv-bias --untie-embeddings-and-output-weights --use-rope-scaling --rotary-base 7"
    problems = problems_of(write_config(tmp_path, QWEN3_4B), words.split())
    assert sorted(problem.split()[0] for problem in problems) == [
        "--add-qkv-bias",
        "--num-layers",
        "--rotary-base",
        "--untie-embeddings-and-output-weights",
        "--use-rope-scaling",
    ]


def test_spellings_that_mean_the_same_are_no_contradiction(tmp_path: Path) -> None:
    hf = write_config(tmp_path, DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1})
    words = "--moe-router-num-groups 1 --moe-router-group-topk 1 --kv-channels 56"
    assert problems_of(hf, words.split()) == []
    hf = write_config(tmp_path, QWEN3_4B)
    words = "--norm-epsilon 1e-6 --mscale 1.0 --rotary-scaling-factor 1 --seq-length 8192"
    assert problems_of(hf, words.split()) == []
    dense_width = ["--ffn-hidden-size", "768"]  # read by nothing where all layers have experts
    assert problems_of(write_config(tmp_path, QWEN3_30B), dense_width) == []
    assert problems_of(write_config(tmp_path, DEEPSEEK_V3), dense_width) != []


def test_flags_that_are_left_out_are_derived(tmp_path: Path) -> None:
    args = resolved(write_config(tmp_path, DEEPSEEK_V3), [])
    assert (args.num_layers, args.hidden_size, args.vocab_size) == (61, 7168, 129280)
    assert args.padded_vocab_size == 129280
    assert args.moe_layer_freq == [0] * 3 + [1] * 58
    assert (args.multi_latent_attention, args.q_lora_rank, args.group_query_attention) == (True, 1536, False)
    assert (args.rope_type, args.rotary_scaling_factor, args.mscale_all_dim) == ("yarn", 40.0, 1.0)
    assert (args.num_experts, args.moe_router_num_groups, args.moe_shared_expert_intermediate_size) == (256, 8, 2048)
    assert (args.swiglu, args.add_bias_linear, args.untie_embeddings_and_output_weights) == (True, False, True)
    dense = resolved(write_config(tmp_path, QWEN3_4B), [])
    assert (dense.rope_type, dense.num_experts, dense.moe_layer_freq) == ("rope", None, None)
    assert (dense.group_query_attention, dense.num_query_groups, dense.qk_layernorm) == (True, 8, True)
    assert (dense.rotary_base, dense.seq_length, dense.max_position_embeddings) == (1000000, 4096, 40960)
    assert isinstance(dense.rotary_base, int)


def test_the_embedding_is_padded_for_the_tensor_parallel_ranks(tmp_path: Path) -> None:
    hf = write_config(tmp_path, QWEN3_4B | {"vocab_size": 151})
    assert resolved(hf, []).padded_vocab_size == 256
    assert resolved(hf, ["--tensor-model-parallel-size", "4"]).padded_vocab_size == 512
    assert resolved(hf, ["--make-vocab-size-divisible-by", "10"]).padded_vocab_size == 160
    assert resolved(hf, ["--padded-vocab-size", "200"]).padded_vocab_size == 200


def test_a_yaml_list_is_a_pattern_too(tmp_path: Path) -> None:
    hf, file = write_config(tmp_path, DEEPSEEK_V3 | {"num_hidden_layers": 4}), tmp_path / "more.yaml"
    file.write_text("moe_layer_freq: [0, 0, 0, 1]\n")
    assert resolved(hf, ["--custom-config-path", str(file)]).moe_layer_freq == [0, 0, 0, 1]
    assert problems_of(hf, ["--custom-config-path", str(file)]) == []
    file.write_text("moe_layer_freq: [0, 0, 1, 1]\n")
    assert "says 1 for layer 2, which is dense" in problems_of(hf, ["--custom-config-path", str(file)])[0]


def test_deriving_twice_changes_nothing(tmp_path: Path) -> None:
    from slime.backends.megatron_utils.argument_rules import STEPS

    args = resolved(write_config(tmp_path, DEEPSEEK_V3), ["--moe-layer-freq", "[0]*3+[1]*58"])
    before = {name: value for name, value in vars(args).items() if name != "notices"}
    for step in STEPS:
        step(args)
    assert {name: value for name, value in vars(args).items() if name != "notices"} == before


def test_generation_alone_takes_any_model(tmp_path: Path) -> None:
    hf = write_config(tmp_path, QWEN3_4B | {"model_type": "mamba"})
    assert problems_of(hf, []) != []
    assert problems_of(hf, ["--debug-rollout-only", "--num-layers", "3"]) == []


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("[0]*3+[1]*5", [0, 0, 0, 1, 1, 1, 1, 1]),
        (" ([0] + [1]) * 4 ", [0, 1] * 4),
        ("4*[0,1]", [0, 1] * 4),
        ("[0]*1+[1]*7", [0] + [1] * 7),
        ("1", [1] * 8),
        ("2", [1, 0] * 4),
        ("[1]*0", []),
        ("0", None),
        ("-1", None),
        ("[2]*8", None),
        ("[1]*99999999", None),
        ("[1]*9999*9999", None),
        ("[[1]]*8", None),
        ("[1]+1", None),
        ("[1]*[1]", None),
        ("2*3", None),
        ("[True]*8", None),
        ("[1.0]*8", None),
        ("[1 for _ in range(8)]", None),
        ("__import__('os').getpid()", None),
        ("(1", None),
        ("", None),
    ],
)
def test_a_pattern_of_layers_is_evaluated_without_running_code(text: str, layers: list[int] | None) -> None:
    assert expand_layer_pattern(text, 8) == layers
