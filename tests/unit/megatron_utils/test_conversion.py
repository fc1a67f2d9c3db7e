"""The functions of users' conversion scripts: what goes in comes out, as a checkpoint or tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_direct_to_path
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.initialize import init
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf, remove_padding
from slime.backends.megatron_utils.megatron_to_hf.qwen2 import convert_qwen2_to_hf
from slime.backends.megatron_utils.misc_utils import strip_param_name_prefix
from slime.backends.megatron_utils.model_provider import get_model_provider_func
from slime.backends.megatron_utils.process_groups import destroy_distributed
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_families import is_left_out, make_family_checkpoint, saved_tensors
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_args, use_single_rank_env


@pytest.fixture(scope="module", autouse=True)
def _single_rank() -> Iterator[None]:
    use_single_rank_env()
    init(make_args("unused"))
    yield
    destroy_distributed()


def loaded(kind: str, path: Path) -> tuple[Any, Any]:
    make_family_checkpoint(kind, path)
    args = make_args(path)
    model = get_model_provider_func(args)(pre_process=True, post_process=True)
    load_hf_weights(args, [model], path)
    return args, model


def test_a_model_that_was_loaded_is_written_as_it_was(tmp_path: Path) -> None:
    args, model = loaded("qwen3", tmp_path / "hf")
    save_hf_model_direct_to_path(args, tmp_path / "out", [model])
    saved, written = saved_tensors(tmp_path / "hf"), saved_tensors(tmp_path / "out")
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[name], written[name]) for name in saved)


def test_the_functions_of_the_families_are_one(tmp_path: Path) -> None:
    args, model = loaded("qwen2", tmp_path)
    name, tensor = next(iter(model.named_parameters()))
    (given,), (same,) = convert_qwen2_to_hf(args, name, tensor), convert_to_hf(args, "qwen2", name, tensor)
    assert given[0] == same[0]
    assert torch.equal(given[1], same[1])


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_every_tensor_has_its_hugging_face_parts(kind: str, tmp_path: Path) -> None:
    args, model = loaded(kind, tmp_path)
    found: dict[str, torch.Tensor] = {}
    named = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.endswith("expert_bias")}}
    for name, tensor in named.items():
        found |= convert_to_hf(args, kind, f"module.module.{name}", remove_padding(name, tensor, VOCAB))
    saved = {name: value for name, value in saved_tensors(tmp_path).items() if not is_left_out(name, kind)}
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name].to(saved[name].dtype), saved[name]) for name in saved)


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    make_family_checkpoint("qwen3", tmp_path)
    args, tensor = make_args(tmp_path), torch.zeros(2)
    with pytest.raises(ConfigError, match=r"layers\.0\.mamba\.weight: models of model_type qwen3 have no such"):
        convert_to_hf(args, "qwen3", "decoder.layers.0.mamba.weight", tensor)
    with pytest.raises(ConfigError, match="quantization_config must be None"):
        convert_to_hf(args, "qwen3", "decoder.final_layernorm.weight", tensor, {"quant_method": "fp8"})


def test_only_embedding_and_head_lose_rows() -> None:
    whole = torch.zeros(128, 4)
    assert remove_padding("module.output_layer.weight", whole, 100).shape == (100, 4)
    assert remove_padding("decoder.layers.0.mlp.linear_fc2.weight", whole, 100).shape == (128, 4)
    assert strip_param_name_prefix("module.module.decoder.final_layernorm.weight") == "decoder.final_layernorm.weight"


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])  # tied, untied
def test_a_critic_ends_in_one_value_per_token(kind: str, tmp_path: Path) -> None:
    make_family_checkpoint(kind, tmp_path)
    model = get_model_provider_func(make_args(tmp_path), "critic")()
    assert [tuple(p.shape) for n, p in model.named_parameters() if "output_layer.weight" in n] == [(1, 32)]
