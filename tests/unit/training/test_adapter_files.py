"""Adapters on disk: the fingerprint of their base, and combinations that are refused before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.training.adapter_files import base_fingerprint
from slime.models.hf_shape import read_shape
from slime.models.lora import CONFIG_FILE, FILE_PREFIX, WEIGHTS_FILE, LoraConfig, adapter_tensors
from tests.unit.config.tiny_command import QWEN3, TinyCommand, make_command, make_model

LORA = ("--lora-rank", 8, "--lora-alpha", 16)
MOE = QWEN3 | {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
}


def _write(directory: Path, tensors: dict[str, torch.Tensor], num_files: int = 1) -> str:
    directory.mkdir(exist_ok=True)
    for number in range(num_files):
        part = dict(list(tensors.items())[number::num_files])
        save_file(part, directory / f"model-{number}.safetensors", metadata={"format": "pt"})
    return str(directory)


def test_a_change_of_one_kind_of_layer_changes_the_fingerprint_of_a_model_with_many_experts(tmp_path: Path) -> None:
    names = [f"model.layers.{n}.mlp.experts.{e}.up_proj.weight" for n in range(3) for e in range(200)]
    names += [f"model.layers.{n}.self_attn.{kind}_proj.weight" for n in range(3) for kind in "qo"]
    base = {name: torch.full((2, 2), float(number)) for number, name in enumerate(names)}
    expected = base_fingerprint(_write(tmp_path / "base", base))
    assert base_fingerprint(_write(tmp_path / "divided", base, num_files=3)) == expected
    for name in names[-6:]:
        changed = base_fingerprint(_write(tmp_path / "changed", base | {name: base[name] + 1}))
        assert changed != expected, name
    assert base_fingerprint(_write(tmp_path / "wide", base | {names[0]: torch.zeros(2, 3)})) != expected
    assert base_fingerprint(str(tmp_path)) == "", "no safetensors file"


@pytest.fixture
def line(tmp_path: Path) -> TinyCommand:
    return make_command(tmp_path)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--lora-rank", -1), "--lora-rank -1 must be positive, or 0 to train all weights"),
        (("--lora-rank", 33), "--lora-rank 33 is larger than a dimension of self_attn.k_proj [32, 64]"),
        ((*LORA, "--lora-dropout", 1), "--lora-dropout 1.0 must be at least 0 and less than 1"),
        ((*LORA, "--lora-alpha", 0), "--lora-alpha 0.0 must be positive"),
        ((*LORA, "--lora-target-modules", "q_porj"), "q_porj matches no linear layer of model_type qwen3. Names are"),
        (("--lora-merge",), "--lora-merge needs --lora-rank"),
        ((*LORA, "--ref-load", "{dir}"), "is another base than that of the engines"),
        ((*LORA, "--only-train-params-name-list", "q"), "drop --only-train-params-name-list"),
        ((*LORA, "--transformer-impl", "transformer_engine"), "give --transformer-impl local"),
        ((*LORA, "--lora-experts", "--expert-tensor-parallel-size", 2), "experts with adapters are not cut. Give 1"),
        ((*LORA, "--lora-experts", "--train-backend", "fsdp"), "Use --train-backend megatron, or drop it"),
        ((*LORA, "--sglang-quantization", "fp8"), "slime does not serve adapters of quantized engines"),
        ((*LORA, "--load", "{dir}/model"), "with --lora-rank the base is --hf-checkpoint. Drop --load"),
        ((*LORA, "--enable-mtp-training", "--mtp-num-layers", 1), "drop --enable-mtp-training"),
        ((*LORA, "--moe-router-bias-update-rate", 0.1), "keeps the routers: drop --moe-router-bias-update-rate 0.1"),
    ],
    ids=lambda value: " ".join(map(str, value[-2:])) if isinstance(value, tuple) else "",
)
def test_flags_that_do_not_fit_are_one_error_each(line: TinyCommand, flags: tuple[Any, ...], problem: str) -> None:
    _, problems = line.run(*flags)
    assert sum(problem in one for one in problems.splitlines()) == 1, problems
    assert not line.run(*LORA)[1]


def test_experts_follow_the_tensor_parallel_size_and_are_then_refused(line: TinyCommand) -> None:
    _, problems = line.run(*LORA, "--lora-experts", "--tensor-model-parallel-size", 2, "--sequence-parallel")
    assert "--lora-experts with --expert-tensor-parallel-size 2: experts with adapters are not cut" in problems


def _adapter(line: TinyCommand, config: dict[str, Any] | None = None, **tensors: Any) -> str:
    """An adapter of peft for the model of ``line``. ``tensors``: None removes the names that end so."""
    lora, shape = LoraConfig(8, alpha=16.0), read_shape(line.model)
    directory = line.directory / "adapter"
    directory.mkdir()
    sizes = adapter_tensors(shape, lora)
    values = {FILE_PREFIX + name: torch.zeros(sizes[name]) for name in sizes}
    metadata = {"format": "pt"} | tensors.pop("metadata", {})
    for end, value in tensors.items():
        (name,) = [name for name in values if name.endswith(f"layers.1.{end.replace('__', '.')}.weight")]
        values = {key: one for key, one in values.items() if key != name} | ({} if value is None else {name: value})
    save_file(values, directory / WEIGHTS_FILE, metadata=metadata)
    (directory / CONFIG_FILE).write_text(json.dumps(lora.peft_config(shape, line.model) | (config or {})))
    return str(directory)


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        ({"peft_type": "LOHA"}, {}, "has peft_type LOHA; only LORA can be computed"),
        ({"use_dora": True}, {}, "has use_dora True, which is not computed"),
        ({"alora_invocation_tokens": [1]}, {}, "has alora_invocation_tokens [1], which is not computed"),
        ({"bias": "all"}, {}, "only adapters without biases are computed"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "has init_lora_weights pissa_niter_4, which has changed the base"),
        ({"r": 4}, {}, "was trained with r 4, but --lora-rank is 8"),
        ({"lora_alpha": 8}, {}, "was trained with lora_alpha 8, but --lora-alpha is 16.0"),
        ({"use_rslora": True}, {}, "was trained with use_rslora True, but --lora-use-rslora is False"),
        ({}, {"metadata": {"slime_base": "another"}}, "is an adapter of another base than --hf-checkpoint"),
        ({}, {"mlp__up_proj__lora_B": torch.zeros(1, 8)}, "has shape [1, 8], and 1 of 28 tensors do not fit"),
        ({}, {"mlp__up_proj__lora_B": None}, "lacks base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"),
    ],
    ids=["peft_type", "dora", "alora", "bias", "pissa", "rank", "alpha", "rslora", "base", "shape", "lacks"],
)
def test_an_adapter_that_does_not_fit_the_run_is_refused(
    line: TinyCommand, config: dict[str, Any], tensors: dict[str, Any], problem: str
) -> None:
    _, problems = line.run(*LORA, "--lora-adapter-path", _adapter(line, config, **tensors))
    assert problem in problems
    assert problems.count("--lora-adapter-path") == 1


def test_an_adapter_that_fits_starts_a_run_and_no_adapter_does_not(line: TinyCommand) -> None:
    assert not line.run(*LORA, "--lora-adapter-path", _adapter(line))[1]
    _, problems = line.run(*LORA, "--lora-adapter-path", line.model)
    assert "is not the directory of a peft adapter (adapter_config.json, adapter_model.safetensors)" in problems


def test_adapters_that_peft_would_load_into_experts_are_announced(tmp_path: Path) -> None:
    line = make_command(tmp_path)
    make_model(tmp_path / "model", MOE)
    flags = (*LORA, "--lora-target-modules", "mlp.up_proj")
    assert "peft 0.21 takes up_proj for names of routed experts" in line.warnings(*flags)
    assert "peft 0.21" not in line.warnings(*flags, "--lora-merge")
    assert "peft 0.21" not in line.warnings(*LORA)
