"""Sharded models of transformers read packed samples as the originals read single ones. Weights convert both ways."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.backends.fsdp_utils.model import local_tensor
from slime.backends.training.data import TrainBatch
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint, saved_tensors
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_batch, schedule, use_single_rank_env
from tests.verification import verify

NASTY = [(1, 1), (1, 40), (63, 2), (5, 60)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    use_single_rank_env()
    dist.init_process_group("gloo")
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _built(path: Path, mesh: Any, **settings: Any) -> Any:
    from slime.backends.fsdp_utils.model import build_model, read_config

    return build_model(read_config(str(path)), mesh, compute_dtype=torch.float32, **settings).eval()


def _loaded(path: Path, mesh: Any, **settings: Any) -> Any:
    from slime.backends.fsdp_utils.weights import load_weights

    model = _built(path, mesh, **settings)
    load_weights(model, str(path), "--hf-checkpoint")
    return model


def _logits(model: Any, batch: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Per sample (tokens, logits ``[L, V]``) from packed micro-batches."""
    from slime.backends.fsdp_utils.step import run_model

    for micro_batch in TrainBatch(batch, torch.device("cpu")).micro_batches(0, all_rows=True):
        tokens = [batch["tokens"][index] for index in micro_batch.indices]
        parts = run_model(model, micro_batch)[0].split([len(one) for one in tokens])
        yield from zip(tokens, parts, strict=True)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3"])
@torch.no_grad()
def test_packed_samples_give_the_logits_of_each_sample_alone(kind: str, mesh: Any, tmp_path: Path) -> None:
    import transformers

    make_family_checkpoint(kind, tmp_path)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = _loaded(tmp_path, mesh)
    pairs = [(logits, original(tokens[None]).logits[0]) for tokens, logits in _logits(model, make_batch(lengths=NASTY))]
    ours, theirs = (torch.cat(side) for side in zip(*pairs, strict=True))
    verify("logits of packed samples, FSDP backend", "transformers, each sample alone", ours, theirs, tolerance=1e-5)


@pytest.mark.parametrize("kind", ["Gemma", "Phi3", "Qwen2Moe"])
@torch.no_grad()
def test_a_model_that_only_transformers_knows_works_as_well(kind: str, mesh: Any, tmp_path: Path) -> None:
    from slime.backends.fsdp_utils.weights import export_weights
    from slime.backends.training.hf_files import TensorReader

    original = _saved_model(kind, tmp_path, attention_dropout=0.5)
    model = _loaded(tmp_path, mesh).train()  # no dropout is left
    for tokens, logits in _logits(model, make_batch(lengths=NASTY)):
        torch.testing.assert_close(logits, original(tokens[None]).logits[0], atol=1e-4, rtol=0)
    exported = dict(export_weights(model, TensorReader(tmp_path, "").names, torch.float32))
    saved = saved_tensors(tmp_path)
    assert set(exported) == set(saved)
    assert all(torch.equal(exported[name], value) for name, value in saved.items())


def test_layers_that_carry_a_state_from_token_to_token_are_refused(mesh: Any, tmp_path: Path) -> None:
    _saved_model("Qwen3Next", tmp_path)
    with pytest.raises(ConfigError, match=r"linear_attention.*leak between samples"):
        _built(tmp_path, mesh)


def _saved_model(kind: str, path: Path, **settings: Any) -> Any:
    """A tiny random model of ``<kind>Config``, saved at ``path``."""
    import transformers

    sizes = {
        **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16},
        **{"shared_expert_intermediate_size": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
    }
    config = getattr(transformers, f"{kind}Config")(**(sizes | settings))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    return model.eval()


def _prefix_batch(prompt: int, response: int, number: int = 6) -> dict[str, Any]:
    """One micro-batch of samples with one prompt. The last but one ends within the first, the last is the first."""
    lengths = [(prompt, response)] * (number - 2) + [(prompt, response // 2), (prompt, response)]
    batch = make_batch(number, lengths=lengths)
    first = batch["tokens"][0]
    for tokens in batch["tokens"][1:-2]:
        tokens[:prompt] = first[:prompt]
    batch["tokens"][-2:] = [first[: prompt + response // 2].clone(), first.clone()]
    return schedule(batch, [list(range(number))], size=number)


def _log_probs(model: Any, batch: dict[str, Any], *, shares: bool) -> tuple[torch.Tensor, int]:
    """(log-probs of the responses in the order of the samples, rows that passed the model) of one micro-batch."""
    from slime.backends.fsdp_utils.step import run_model

    (one,) = TrainBatch(batch, torch.device("cpu"), shares_prefixes=shares).micro_batches(0)
    scores = run_model(model, one).log_softmax(-1).gather(1, one.packed.response_targets[:, None]).squeeze(1)
    parts = dict(zip(one.indices, one.gather(scores).split(one.response_lengths), strict=True))
    return torch.cat([parts[index] for index in range(len(parts))]), one.packed.tokens.numel()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3", "Gemma", "Phi3", "Qwen2Moe"])
def test_shared_prefixes_change_no_log_prob_and_no_gradient(
    kind: str, recomputes: bool, mesh: Any, tmp_path: Path
) -> None:
    if kind.islower():
        make_family_checkpoint(kind, tmp_path)
    else:
        _saved_model(kind, tmp_path)
    model = _loaded(tmp_path, mesh, checkpoints_layers=recomputes).train()
    batch = _prefix_batch(11, 6)
    found = []
    for shares in (True, False):
        model.zero_grad()
        values, rows = _log_probs(model, batch, shares=shares)
        (values * torch.linspace(-1, 1, len(values))).sum().backward()
        gradients = {name: local_tensor(one.grad).clone() for name, one in model.named_parameters()}
        found.append((values.detach(), rows, gradients))
    (ours, fewer, mine), (theirs, rows, others) = found
    assert (fewer, rows) == (11 + 4 * 6, 5 * 17 + 14)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for name, gradient in mine.items():
        largest = float(others[name].abs().max())
        torch.testing.assert_close(gradient, others[name], rtol=0, atol=1e-6 * (1 + largest))


def test_activations_of_a_shared_prefix_are_kept_once(mesh: Any, tmp_path: Path) -> None:
    """Keys and values too, although attention reads them once per sample."""
    make_family_checkpoint("qwen3", tmp_path)
    model, batch = _loaded(tmp_path, mesh).train(), _prefix_batch(200, 2)

    def kept_bytes(shares: bool) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            values, _ = _log_probs(model, batch, shares=shares)
        assert values.requires_grad  # alive until here
        return sum(event.self_cpu_memory_usage for event in profile.events())

    assert kept_bytes(True) < 0.19 * kept_bytes(False)


@torch.no_grad()
def test_attention_of_transformers_reads_packed_samples_as_well(mesh: Any, tmp_path: Path) -> None:
    make_family_checkpoint("qwen3", tmp_path)
    batch = make_batch(lengths=NASTY)
    ours, theirs = (_loaded(tmp_path, mesh, attention=name) for name in (None, "sdpa"))
    for (_, mine), (_, other) in zip(_logits(ours, batch), _logits(theirs, batch), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "glm4_moe"])
def test_an_export_has_the_names_and_bits_of_the_checkpoint(kind: str, mesh: Any, tmp_path: Path) -> None:
    from slime.backends import Recipients
    from slime.backends.fsdp_utils.weights import export_weights
    from slime.backends.training.hf_files import TensorReader

    make_family_checkpoint(kind, tmp_path)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    saved = {
        name: value for name, value in saved_tensors(tmp_path).items() if not name.startswith(f"model.layers.{layers}.")
    }
    names = TensorReader(tmp_path, "").names
    model = _loaded(tmp_path, mesh)
    exported = dict(export_weights(model, names, torch.float32))
    assert set(exported) == set(saved)
    assert all(torch.equal(exported[name], value) for name, value in saved.items())
    second_half = {name for name, _ in export_weights(model, names, torch.float32, Recipients(blocks=((1, 2),)))}
    assert second_half == {name for name in saved if not re.search(r"\.experts\.[0-3]\.", name)}


def test_all_missing_misshapen_and_unknown_tensors_are_named_in_one_message_of_the_loader(
    mesh: Any, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    make_family_checkpoint("qwen3_moe", tmp_path)
    tensors = saved_tensors(tmp_path)
    missing = "model.layers.0.mlp.experts.3.up_proj.weight"
    del tensors[missing]
    tensors["model.norm.weight"] = torch.zeros(3)
    tensors["model.layers.0.extra"] = torch.zeros(1)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as error:
        _loaded(tmp_path, mesh)
    text = str(error.value)
    assert f"tensor {missing} is missing" in text
    assert "model.norm.weight is [3], but the model that config.json describes needs [32]" in text
    assert "tensor model.layers.0.extra has no place" in text


def test_a_sliding_window_is_refused_instead_of_ignored(mesh: Any, tmp_path: Path) -> None:
    make_family_checkpoint("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = _loaded(tmp_path, mesh)
    with pytest.raises(NotImplementedError, match="sliding windows"):
        list(_logits(model, make_batch()))


def test_an_untied_head_that_no_file_has_is_not_replaced_by_the_embedding(mesh: Any, tmp_path: Path) -> None:
    make_family_checkpoint("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ConfigError, match=r"tensor lm_head.weight is missing in its .safetensors files"):
        _loaded(tmp_path, mesh)


@torch.no_grad()
def test_layers_compute_in_bf16_on_fp32_weights(mesh: Any, tmp_path: Path) -> None:
    make_family_checkpoint("qwen3", tmp_path)
    from slime.backends.fsdp_utils.model import build_model, read_config
    from slime.backends.fsdp_utils.weights import load_weights

    model = build_model(read_config(str(tmp_path)), mesh, compute_dtype=torch.bfloat16)
    load_weights(model, str(tmp_path), "")
    exact = _loaded(tmp_path, mesh)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for (_, mine), (_, other) in zip(_logits(model, make_batch()), _logits(exact, make_batch()), strict=True):
        difference = (mine - other).abs().max()
        assert 1e-4 < difference < 0.1 * other.abs().max()
