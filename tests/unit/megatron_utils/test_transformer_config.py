"""From config.json and flags to a Megatron model: the logits of ``transformers``, and where each setting comes from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.algorithms import logprobs
from slime.backends import weights_dtype
from slime.backends.megatron_utils.optimizer_rules import has_te_attention
from slime.backends.megatron_utils.transformer_config import transformer_config_kwargs
from slime.config.groups import RunConfig
from slime.models.hf_shape import read_shape, shape_from_config
from slime.models.shape import ModelShape
from tests.unit.megatron_utils.hub_models import DEEPSEEK_V3, GLM45_AIR, MOONLIGHT, QWEN3_4B, QWEN3_30B
from tests.unit.megatron_utils.tiny_families import KINDS, make_family_checkpoint, packed_logits
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_args, use_single_rank_env


@pytest.mark.usefixtures("megatron_groups")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_built_from_its_directory_alone_gives_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
    from slime.backends.megatron_utils.model.build import build_model
    from slime.backends.megatron_utils.transformer_config import build_config

    reference = make_family_checkpoint(kind, tmp_path)
    shape = read_shape(str(tmp_path))
    config = build_config(RunConfig.of(make_args(tmp_path)))
    model = build_model(shape, config, padded_vocab_size=shape.padded_vocab_size(128)).eval()
    load_weights(model, shape, str(tmp_path), "--hf-checkpoint")
    sequences = [
        torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(1)) for length in (9, 1, 70)
    ]
    with torch.no_grad():
        expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    assert (packed_logits(model, sequences) - expected).abs().max() < 1e-5


def _kwargs(config: dict[str, Any], **flags: Any) -> dict[str, Any]:
    return transformer_config_kwargs(RunConfig.of(make_args("unread", **flags)), shape_from_config(config, "hub"))


def test_a_softmax_router_normalizes_after_the_choice() -> None:
    kwargs = _kwargs(QWEN3_30B)
    assert kwargs["num_moe_experts"] == 128
    assert kwargs["moe_layer_freq"] == [1] * 48
    assert (kwargs["moe_router_score_function"], kwargs["moe_router_pre_softmax"]) == ("softmax", False)
    assert kwargs["moe_router_topk_scaling_factor"] is None
    assert kwargs["moe_router_dtype"] is None
    assert _kwargs(QWEN3_30B, moe_router_dtype="fp32")["moe_router_dtype"] == "fp32"
    assert _kwargs(QWEN3_30B | {"norm_topk_prob": False})["moe_router_pre_softmax"] is True


def test_the_flex_dispatcher_comes_with_its_kernels_and_fp32_weights() -> None:
    kwargs = _kwargs(QWEN3_30B, transformer_impl="transformer_engine", moe_token_dispatcher_type="flex")
    names = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_permute_fusion", "moe_router_dtype")
    assert [kwargs[name] for name in names] == ["flex", "deepep", True, "fp32"]


def test_latent_attention_over_context_parallel_ranks_is_not_transformer_engines() -> None:
    for ranks, is_exchanged in ((1, True), (2, False)):
        args = make_args("unread", fp32=False, transformer_impl="transformer_engine", context_parallel_size=ranks)
        assert has_te_attention(args, is_latent=True) == is_exchanged
        assert has_te_attention(args, is_latent=False)


def test_a_sigmoid_router_has_groups_scaling_and_a_bias_that_stays() -> None:
    kwargs = _kwargs(DEEPSEEK_V3)
    assert kwargs["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert (kwargs["moe_router_num_groups"], kwargs["moe_router_group_topk"]) == (8, 4)
    assert kwargs["moe_router_topk_scaling_factor"] == 2.5
    assert kwargs["moe_shared_expert_intermediate_size"] == 2048
    assert kwargs["moe_router_bias_update_rate"] == 0.0
    assert kwargs["moe_router_dtype"] == "fp32"
    assert _kwargs(DEEPSEEK_V3, moe_router_bias_update_rate=0.001)["moe_router_bias_update_rate"] == 0.001


def test_latent_attention_has_yarn_only_where_the_checkpoint_has_it() -> None:
    kwargs = _kwargs(DEEPSEEK_V3)
    assert kwargs["multi_latent_attention"] is True
    assert kwargs["rope_type"] == "yarn"
    assert (kwargs["rotary_scaling_factor"], kwargs["mscale"], kwargs["mscale_all_dim"]) == (40.0, 1.0, 1.0)
    assert kwargs["original_max_position_embeddings"] == 4096
    plain = _kwargs(MOONLIGHT)
    assert (plain["rope_type"], plain["rotary_scaling_factor"], plain["mscale_all_dim"]) == ("rope", 1.0, 0.0)
    assert plain["q_lora_rank"] is None
    assert "q_lora_rank" not in _kwargs(QWEN3_4B)


def test_the_config_of_one_checkpoint_decides_norms_and_biases_not_the_family() -> None:
    assert _kwargs(GLM45_AIR)["qk_layernorm"] is False
    assert _kwargs(GLM45_AIR | {"use_qk_norm": True})["qk_layernorm"] is True
    assert _kwargs(GLM45_AIR)["add_qkv_bias"] is True
    assert _kwargs(GLM45_AIR | {"attention_bias": False})["add_qkv_bias"] is False


def test_a_load_balancing_loss_of_weight_zero_is_not_computed() -> None:
    off = _kwargs(QWEN3_30B, moe_router_load_balancing_type=["seq_aux_loss"], moe_aux_loss_coeff=[0.0])
    assert off["moe_router_load_balancing_type"] == "none"
    on = _kwargs(QWEN3_30B, moe_router_load_balancing_type=["seq_aux_loss"], moe_aux_loss_coeff=[0.1])
    assert (on["moe_router_load_balancing_type"], on["moe_aux_loss_coeff"]) == ("seq_aux_loss", 0.1)
    both = _kwargs(
        QWEN3_30B, moe_router_load_balancing_type=["aux_loss", "global_aux_loss"], moe_aux_loss_coeff=[0.1, 0.2]
    )
    assert both["moe_router_load_balancing_type"] == ["aux_loss", "global_aux_loss"]
    assert both["moe_aux_loss_coeff"] == [0.1, 0.2]


def test_layouts_are_passed_on_and_exchanges_are_not_batched_with_interleaving() -> None:
    kwargs = _kwargs(
        QWEN3_4B,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=4,
        context_parallel_size=2,
        virtual_pipeline_model_parallel_size=3,
        microbatch_group_size_per_vp_stage=4,
        decoder_first_pipeline_num_layers=6,
    )
    assert kwargs["sequence_parallel"] is True
    assert kwargs["expert_tensor_parallel_size"] == 2
    assert kwargs["num_layers_in_first_pipeline_stage"] == 6
    assert kwargs["microbatch_group_size_per_vp_stage"] == 4
    assert (kwargs["overlap_p2p_comm"], kwargs["batch_p2p_comm"]) == (True, False)
    assert _kwargs(QWEN3_4B, sequence_parallel=True)["sequence_parallel"] is False
    assert _kwargs(QWEN3_4B)["batch_p2p_comm"] is True


@pytest.mark.parametrize(
    ("flags", "name"),
    [({}, "bfloat16"), ({"bf16": True}, "bfloat16"), ({"fp16": True}, "float16"), ({"fp32": True}, "float32")],
)
def test_half_precision_is_the_default(flags: dict[str, bool], name: str) -> None:
    args = make_args("unread", **({"fp32": False} | flags))
    assert weights_dtype(fp16=args.fp16, fp32=args.fp32) == name
    kwargs = transformer_config_kwargs(RunConfig.of(args), shape_from_config(QWEN3_4B, "hub"))
    assert (kwargs["bf16"], kwargs["fp16"]) == (name == "bfloat16", name == "float16")


def test_every_setting_is_a_field_of_megatrons_config() -> None:
    use_single_rank_env()
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    latent = {item.name for item in dataclasses.fields(MLATransformerConfig)}
    plain = {item.name for item in dataclasses.fields(TransformerConfig)}
    assert set(_kwargs(DEEPSEEK_V3)) <= latent
    assert set(_kwargs(QWEN3_30B)) <= plain


def test_settings_of_experts_are_left_to_megatron_for_dense_models() -> None:
    shape = shape_from_config(QWEN3_4B, "hub")
    assert isinstance(shape, ModelShape)
    assert not [name for name in _kwargs(QWEN3_4B) if name.startswith("moe_router") or name == "num_moe_experts"]


@pytest.mark.parametrize(
    ("found", "flags", "fused"),
    [
        ({"triton", "gcc"}, {}, (True, True)),
        ({"triton", "gcc"}, {"bias_swiglu_fusion": False}, (False, True)),
        ({"triton", "gcc"}, {"bias_dropout_fusion": False}, (True, False)),
        ({"gcc"}, {}, (False, False)),
        ({"triton"}, {}, (False, False)),
    ],
)
def test_a_gpu_has_one_kernel_for_swiglu_and_one_for_dropout_if_they_can_be_made(
    found: set[str],
    flags: dict[str, Any],
    fused: tuple[bool, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from slime.backends.megatron_utils.transformer_config import build_config

    make_family_checkpoint("qwen3_moe", tmp_path)
    cpu = build_config(RunConfig.of(make_args(tmp_path)))
    assert (cpu.bias_activation_fusion, cpu.bias_dropout_fusion) == (True, False)
    monkeypatch.setattr("slime.utils.accelerator.current", lambda: SimpleNamespace(is_cpu=False))
    monkeypatch.setattr("slime.algorithms.logprobs.can_compile", logprobs.can_compile.__wrapped__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in found else None)
    monkeypatch.setattr("shutil.which", lambda name: name if name in found else None)
    config = build_config(RunConfig.of(make_args(tmp_path, **flags)))
    assert (config.bias_activation_fusion, config.bias_dropout_fusion) == fused
    assert ("torch.compile lacks" in caplog.text) == (found != {"triton", "gcc"})
