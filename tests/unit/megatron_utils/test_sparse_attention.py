"""Sparse attention against loops over single queries, and as part of a model against ``transformers``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.training.attention import plan_attention
from slime.config.groups import RunConfig
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint, packed_logits, saved_tensors
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_args
from tests.verification import verify

_LENGTHS = (5, 40, 1, 23)
_TOPK = 7


pytestmark = pytest.mark.usefixtures("megatron_groups")


def _bounds() -> torch.Tensor:
    return torch.tensor([0, *_LENGTHS]).cumsum(0, dtype=torch.int32)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(params=[3, 128], ids=["small-blocks", "one-block"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.backends.megatron_utils.model.sparse_attention._BLOCK", request.param)


@pytest.mark.usefixtures("block_size")
def test_the_chosen_keys_are_those_with_the_highest_scores() -> None:
    from slime.backends.megatron_utils.model.sparse_attention import choose_keys

    torch.manual_seed(0)
    total = sum(_LENGTHS)
    query, key, weight = _random(total, 12, 6), _random(total, 6), torch.randn(total, 12)
    chosen = choose_keys(query, key, weight, plan_attention(_bounds()).pieces, _TOPK)
    assert chosen.dtype == torch.int32
    for start, length in zip(_bounds().tolist(), _LENGTHS, strict=False):
        for t in range(_TOPK, length):
            scores = [
                sum(weight[start + t, h] * max(0.0, query[start + t, h] @ key[start + s]) for h in range(12))
                for s in range(t + 1)
            ]
            best = sorted(range(t + 1), key=lambda s: -scores[s])[:_TOPK]
            assert sorted(chosen[start + t].tolist()) == sorted(best)


@pytest.mark.usefixtures("block_size")
def test_outputs_and_gradients_are_those_of_a_softmax_over_the_chosen_keys_alone() -> None:
    from slime.backends.megatron_utils.model.sparse_attention import attend_to_chosen, choose_keys

    torch.manual_seed(0)
    total, heads = sum(_LENGTHS), 3
    pieces = plan_attention(_bounds()).pieces
    chosen = choose_keys(_random(total, 12, 6), _random(total, 6), torch.randn(total, 12), pieces, _TOPK)
    tensors = [_random(total, heads, width).requires_grad_() for width in (8, 8, 5)]
    query, key, value = tensors
    out = attend_to_chosen(query, key, value, pieces, chosen, scale=0.3)
    rows = []
    for start, length in zip(_bounds().tolist(), _LENGTHS, strict=False):
        for t in range(length):
            seen = [start + s for s in chosen[start + t].tolist() if s <= t] if length > _TOPK else []
            seen = seen if t >= _TOPK else list(range(start, start + t + 1))
            weights = torch.einsum("hd,khd->hk", query[start + t], key[seen]).mul(0.3).softmax(-1)
            rows.append(torch.einsum("hk,khv->hv", weights, value[seen]))
    expected = torch.stack(rows)
    cotangent = torch.randn_like(expected)
    verify("sparse attention, fp64", "a loop over queries", out, expected, tolerance=1e-12)
    ours, theirs = (torch.autograd.grad(result, tensors, cotangent) for result in (out, expected))
    for mine, loop in zip(ours, theirs, strict=True):
        verify("gradients of sparse attention, fp64", "a loop over queries", mine, loop, tolerance=1e-12)


def _load(kind: str, path: Path) -> tuple[Any, Any]:
    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
    from tests.unit.megatron_utils.family_models import build_family_model, shape_of

    reference = make_family_checkpoint(kind, path)
    model = build_family_model(path)
    load_weights(model, shape_of(path), str(path), "--hf-checkpoint")
    return reference, model


def _sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "minimax_m2"])
def test_gradients_of_a_model_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Gradients of all but the experts, which ``transformers`` stacks. The indexer has none on either side."""
    from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights
    from slime.backends.megatron_utils.model.attention import packed_segments
    from tests.unit.megatron_utils.family_models import shape_of

    reference, model = _load(kind, tmp_path)
    sequences = _sequences(9, 40)
    weights = torch.randn(49, VOCAB, generator=torch.Generator().manual_seed(2))
    logits = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    (logits.log_softmax(-1) * weights).sum().backward()
    segments = packed_segments(torch.tensor([0, 9, 49], dtype=torch.int32), 40)
    positions = torch.cat([torch.arange(9), torch.arange(40)])
    out = model(torch.cat(sequences)[None], positions[None], None, packed_seq_params=segments)[0, :, :VOCAB]
    (out.log_softmax(-1) * weights).sum().backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    exported = dict(export_weights(model, shape_of(tmp_path)))
    expected = {name: parameter.grad for name, parameter in reference.named_parameters() if name in exported}
    assert {name for name, gradient in expected.items() if gradient is None} == {
        name for name in exported if ".indexer." in name
    }
    for name, gradient in expected.items():
        theirs = torch.zeros_like(exported[name]) if gradient is None else gradient
        what = f"gradients of {kind}"
        verify(what, "transformers", exported[name], theirs, tolerance=1e-4, scale="mixed")


def test_the_choice_matters_and_neighbors_in_the_pack_do_not(tmp_path: Path) -> None:
    _, model = _load("glm_moe_dsa", tmp_path)
    first, second, third = _sequences(30, 50, 20)
    alone = packed_logits(model, [second])
    torch.testing.assert_close(packed_logits(model, [first, second, third])[30:80], alone, atol=1e-6, rtol=0)
    layer = model.decoder.layers[1].self_attention
    layer.indexer.weights_proj.weight.data.neg_()
    others = packed_logits(model, [second])
    torch.testing.assert_close(others[:12], alone[:12], atol=1e-6, rtol=0)  # these see all keys
    assert (others[20:] - alone[20:]).abs().max() > 0.1


def test_only_the_indexers_are_frozen_and_shared_layers_have_none(tmp_path: Path) -> None:
    _, model = _load("glm_moe_dsa", tmp_path)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    indexers = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert frozen == indexers
    assert {name.split(".")[2] for name in indexers} == {"0", "1"}


def test_indexers_that_no_layer_uses_are_left_unread(tmp_path: Path) -> None:
    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
    from tests.unit.megatron_utils.family_models import build_family_model, shape_of

    make_family_checkpoint("glm_moe_dsa", tmp_path)
    tensors = saved_tensors(tmp_path)
    has, shares = "model.layers.1.self_attn.indexer.", "model.layers.2.self_attn.indexer."
    tensors |= {name.replace(has, shares): value.clone() for name, value in tensors.items() if name.startswith(has)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_weights(build_family_model(tmp_path), shape_of(tmp_path), str(tmp_path), "--hf-checkpoint")


@pytest.mark.parametrize(
    ("kind", "module", "function"),
    [
        ("glm_moe_dsa", "slime_plugins.models.glm5.glm5", "get_glm5_spec"),
        ("minimax_m2", "slime_plugins.models.minimax_m2", "get_minimax_m2_layer_spec"),
    ],
)
def test_what_launch_scripts_name_as_spec_is_what_the_family_builds(
    kind: str, module: str, function: str, tmp_path: Path
) -> None:
    from slime.backends.megatron_utils.layer_specs import block_spec
    from slime.backends.megatron_utils.transformer_config import build_config
    from tests.unit.megatron_utils.family_models import shape_of

    make_family_checkpoint(kind, tmp_path)
    args, shape = make_args(tmp_path), shape_of(tmp_path)
    config = build_config(RunConfig.of(args), shape)
    named = getattr(importlib.import_module(module), function)(args, config)
    assert named == block_spec(config, shape.family, sparse=shape.sparse)


def test_a_stage_that_begins_with_a_shared_indexer_is_refused(tmp_path: Path) -> None:
    from slime.backends.megatron_utils.model.sparse_attention import make_sparse
    from tests.unit.megatron_utils.family_models import shape_of

    make_family_checkpoint("glm_moe_dsa", tmp_path)
    sparse = shape_of(tmp_path).sparse
    assert sparse is not None
    with pytest.raises(ConfigError, match=r"layer 2 \(counted from 0\) begins a pipeline stage"):
        make_sparse(None, sparse, first_layer=2)
