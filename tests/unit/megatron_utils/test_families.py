"""Every family against ``transformers``: the same logits from the same checkpoint, and the same checkpoint back."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config.groups import RunConfig
from slime.models.family import NOT_BUILT, families, why_not_built
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_families import (
    KINDS,
    is_left_out,
    make_family_checkpoint,
    packed_logits,
    saved_tensors,
)
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_args
from tests.unit.scripts.bash_arrays import model_words
from tests.verification import verify

pytestmark = pytest.mark.usefixtures("megatron_groups")


def _load(path: Path, **overrides: Any) -> Any:
    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
    from tests.unit.megatron_utils.family_models import build_family_model, shape_of

    model = build_family_model(path, **overrides)
    load_weights(model, shape_of(path), str(path), "--hf-checkpoint")
    return model


def _export(model: Any, path: Path, bucket_bytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights
    from tests.unit.megatron_utils.family_models import shape_of

    exported: dict[str, torch.Tensor] = {}
    for name, tensor in export_weights(model, shape_of(path), bucket_bytes, layout_of=str(path)):
        assert name not in exported, f"{name} came twice"
        exported[name] = tensor
    return exported


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_packed_sequences_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = make_family_checkpoint(kind, tmp_path)
    model = _load(tmp_path)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (9, 1, 70)]
    with torch.no_grad():
        expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    verify(f"logits of {kind}", "transformers", packed_logits(model, sequences), expected, tolerance=1e-5)
    assert expected.abs().max() > 1, "the comparison has something to compare"


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    make_family_checkpoint(kind, tmp_path, torch.bfloat16)
    model = _load(tmp_path)
    exported = _export(model, tmp_path)
    dtypes = [tensor.dtype for tensor in exported.values()]
    assert dtypes == sorted(dtypes, key=lambda dtype: dtype == torch.float32), "one dtype after the other"
    model_type = KINDS[kind][2]
    saved = {k: v for k, v in saved_tensors(tmp_path).items() if not is_left_out(k, model_type)}
    assert exported.keys() == saved.keys()
    for name, tensor in exported.items():
        is_wide = name.endswith(("e_score_correction_bias", ".A_log", ".dt_bias"))  # fp32 in the model
        assert tensor.dtype == (torch.float32 if is_wide else torch.bfloat16)
        verify(f"bf16 weights of {kind}, there and back", "the checkpoint", tensor.to(saved[name].dtype), saved[name])


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_of_a_familys_table_is_used_by_one_of_its_models(kind: str, tmp_path: Path) -> None:
    """Lines for other variants of the family are the exception, and named here."""
    from slime.backends.megatron_utils.checkpoint.tensors import ModelTensors
    from tests.unit.megatron_utils.family_models import build_family_model, shape_of

    make_family_checkpoint(kind, tmp_path)
    shape = shape_of(tmp_path)
    tensors = ModelTensors(build_family_model(tmp_path), shape.family, shape.vocab_size, shape.is_tied)
    used = {place.rule for place in tensors.local}
    unused = {rule.megatron for index, rule in enumerate(shape.family.rules) if index not in used}
    unused = {name for name in unused if not name.startswith(("mtp.", "vision_model."))}  # not built here
    layer = "decoder.layers.{layer}."
    variants = {
        "qwen3": {"output_layer.weight"},  # tied
        "qwen3_5": {"output_layer.weight"},
        "glm4_moe": {f"{layer}self_attention.{x}_layernorm.weight" for x in "qk"},
        "moonlight": {
            f"{layer}self_attention.{x}.weight" for x in ("linear_q_down_proj", "q_layernorm", "linear_q_up_proj")
        },
        "deepseek_v3": {f"{layer}self_attention.linear_q_proj.weight"},
        "glm4_moe_lite": {f"{layer}self_attention.linear_q_proj.weight"},
        "kimi_k2": {f"{layer}self_attention.linear_q_proj.weight"},
        "qwen3_moe_unnormalised": {f"{layer}mlp.linear_fc{i}.weight" for i in (1, 2)},  # no dense layer
    }
    assert unused == variants.get(kind, set())


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_the_spec_of_a_launch_script_is_what_the_family_builds(kind: str, tmp_path: Path) -> None:
    from slime.backends.megatron_utils.transformer_config import build_config
    from tests.unit.megatron_utils.family_models import shape_of

    make_family_checkpoint(kind, tmp_path)
    args, shape = make_args(tmp_path), shape_of(tmp_path)
    function = getattr(importlib.import_module(f"slime_plugins.models.{kind}"), f"get_{kind}_spec")
    block = function(args, build_config(RunConfig.of(args), shape))
    is_delta_net = [layer.submodules.self_attention.module.__name__ == "GatedDeltaNet" for layer in block.layer_specs]
    assert shape.delta_net is not None
    assert tuple(is_delta_net) == shape.delta_net.layers


def test_every_spec_that_a_preset_names_is_there() -> None:
    named = {
        tuple(words[i + 1 : i + 3])
        for words in model_words().values()
        for i, word in enumerate(words)
        if word == "--spec"
    }
    assert len(named) >= 6
    for module, function in named:
        assert callable(getattr(importlib.import_module(module), function))


def test_glm4_s_spec_has_its_norms_behind_attention_and_mlp(tmp_path: Path) -> None:
    from slime.backends.megatron_utils.layer_specs import PostNormLayer
    from slime.backends.megatron_utils.transformer_config import build_config
    from slime_plugins.models.glm4 import get_glm_spec
    from tests.unit.megatron_utils.family_models import shape_of

    make_family_checkpoint("glm4", tmp_path)
    block = get_glm_spec(make_args(tmp_path), build_config(RunConfig.of(make_args(tmp_path)), shape_of(tmp_path)))
    assert {layer.module for layer in block.layer_specs} == {PostNormLayer}


def test_a_family_that_cannot_be_built_says_what_is_missing() -> None:
    assert why_not_built("qwen3") is None
    for model_type, missing in NOT_BUILT.items():
        assert model_type not in families()
        assert why_not_built(model_type) == missing
    assert why_not_built("gpt2") == f"it is unknown; supported are {', '.join(sorted(families()))}"


def _rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Any] = saved_tensors(path) | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def test_all_missing_misshapen_and_unknown_tensors_are_named_in_one_message(tmp_path: Path) -> None:
    make_family_checkpoint("qwen3_moe", tmp_path)
    gate, down, up = (
        f"model.layers.0.mlp.experts.{i}.{x}_proj.weight" for i, x in ((2, "gate"), (3, "down"), (5, "up"))
    )
    _rewrite(
        tmp_path, {gate: None, down: torch.zeros(32, 20), up: torch.zeros(7, 32), "model.layers.7.extra": torch.ones(1)}
    )
    with pytest.raises(ConfigError) as error:
        _load(tmp_path)
    text = str(error.value)
    assert f"tensor {gate} is missing" in text
    assert f"{down} makes [32, 20], but the model that config.json describes needs [32, 24]" in text
    assert "makes [31, 32]" in text  # gate and up together
    assert "needs [48, 32]" in text
    assert "tensor model.layers.7.extra has no place in the model" in text


def test_integers_and_a_head_that_contradicts_the_config_are_not_trained(tmp_path: Path) -> None:
    for kind, is_tied in (("qwen3", True), ("llama", False)):
        make_family_checkpoint(kind, tmp_path / kind, tie_word_embeddings=is_tied)
    tied, untied = tmp_path / "qwen3", tmp_path / "llama"
    name = "model.layers.0.self_attn.q_proj.weight"
    _rewrite(tied, {name: saved_tensors(tied)[name].to(torch.int8)})
    with pytest.raises(ConfigError, match=rf"tensor {re.escape(name)} in model.safetensors holds I8 numbers"):
        _load(tied)
    _rewrite(tied, {name: saved_tensors(tied)[name].float()})
    table = saved_tensors(tied)["model.embed_tokens.weight"]
    _rewrite(tied, {"lm_head.weight": table.clone()})
    _load(tied)
    _rewrite(tied, {"lm_head.weight": table + 1})
    with pytest.raises(ConfigError, match=r"tie_word_embeddings true, but lm_head.weight in model.safetensors is not"):
        _load(tied)
    _rewrite(untied, {"lm_head.weight": None})
    with pytest.raises(ConfigError, match=r"tie_word_embeddings false, but no file has lm_head.weight"):
        _load(untied)


def test_many_problems_are_counted_and_not_all_listed(tmp_path: Path) -> None:
    make_family_checkpoint("qwen3_moe", tmp_path)
    experts = [name for name in saved_tensors(tmp_path) if ".experts." in name]
    _rewrite(tmp_path, dict.fromkeys(experts))
    with pytest.raises(ConfigError, match=rf"and {len(experts) - 8} more tensors like these"):
        _load(tmp_path)


def test_layers_that_the_config_does_not_count_are_not_left_out_in_silence(tmp_path: Path) -> None:
    """Only the prediction layers may be left out: here the config takes a decoder layer for one."""
    make_family_checkpoint("deepseek_v3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"tensor model\.layers\.3\..* has no place"):
        _load(tmp_path)


def test_a_parameter_without_a_line_in_the_table_is_an_error(tmp_path: Path) -> None:
    from tests.unit.megatron_utils.family_models import shape_of

    make_family_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"model_type llama: .* no line for parameter .*q_layernorm.weight"):
        _load(tmp_path, shape=dataclasses.replace(shape_of(tmp_path), has_qk_norm=True))


def test_weights_in_8_bits_with_block_scales_are_read_as_bfloat16(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from slime.backends.training.hf_files import TensorReader

    values = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3)
    save_file({"a.weight": values, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    reader = TensorReader(tmp_path, "--hf-checkpoint")
    assert reader.names == {"a.weight"}
    got = reader.get("a.weight")
    assert got.dtype == torch.bfloat16
    for row, column in ((0, 0), (127, 128), (128, 255), (199, 299)):
        expected = (values[row, column].float() * scale[row // 128, column // 128]).bfloat16()
        assert got[row, column] == expected


@pytest.mark.parametrize(
    ("kind", "final_norm"),
    [
        ("mimo", "model.norm.weight"),
        ("glm4_moe", "model.norm.weight"),
        ("qwen3_5_moe", "model.language_model.norm.weight"),
    ],
)
def test_an_exported_directory_keeps_what_was_not_built(kind: str, final_norm: str, tmp_path: Path) -> None:
    """Prediction layers. Of Qwen3.5 also the vision tower, and the experts of a layer stay one tensor."""
    from slime.backends.training.hf_files import write_hf_directory

    source, target = tmp_path / "source", tmp_path / "target"
    make_family_checkpoint(kind, source)
    model = _load(source)
    with torch.no_grad():
        model.decoder.final_layernorm.weight.fill_(2.0)
    write_hf_directory(_export(model, source).items(), str(source), str(target))
    before, after = saved_tensors(source), saved_tensors(target)
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {final_norm}
    assert (target / "config.json").read_text() == (source / "config.json").read_text()
