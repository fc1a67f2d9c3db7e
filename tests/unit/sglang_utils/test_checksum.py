"""Checksums of the trainer's tensors under the engine's names."""

from __future__ import annotations

import hashlib

import pytest
import torch

from slime.backends.sglang_utils.checksum import expected_checksums, tensor_checksum


def test_a_checksum_is_the_start_of_the_sha256_of_the_bytes():
    tensor = torch.arange(5, dtype=torch.float32)
    assert tensor_checksum(tensor) == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def test_a_checksum_does_not_depend_on_strides():
    tensor = torch.randn(4, 3)
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous())


def test_projections_are_combined_as_the_engine_keeps_them_whatever_their_order():
    q, k, v, gate, up = (torch.randn(4, 8) for _ in range(5))
    layer = "model.layers.3."
    weights = [
        (layer + "self_attn.v_proj.weight", v),
        (layer + "mlp.up_proj.weight", up),
        (layer + "self_attn.q_proj.weight", q),
        (layer + "self_attn.k_proj.weight", k),
        (layer + "mlp.gate_proj.weight", gate),
        (layer + "mlp.down_proj.weight", up),
    ]
    assert expected_checksums(weights) == {
        layer + "self_attn.qkv_proj.weight": tensor_checksum(torch.cat([q, k, v])),
        layer + "mlp.gate_up_proj.weight": tensor_checksum(torch.cat([gate, up])),
        layer + "mlp.down_proj.weight": tensor_checksum(up),
    }


def test_the_embedding_is_padded_with_zero_rows_like_the_engines():
    embedding = torch.randn(20, 4)
    padded = torch.cat([embedding, torch.zeros(44, 4)])
    assert expected_checksums([("model.embed_tokens.weight", embedding)]) == {
        "model.embed_tokens.weight": tensor_checksum(padded)
    }


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_the_experts_of_a_layer_are_one_tensor_in_order_of_their_numbers(names: tuple[str, str, str]):
    gate, up, down = names
    prefix = "model.layers.0.mlp.experts."
    gates, ups, downs = (torch.randn(11, 24, 8), torch.randn(11, 24, 8), torch.randn(11, 8, 24))
    rows = torch.zeros(11, 8, 8)  # the engine's inner size is a multiple of 32
    weights = [
        (f"{prefix}{number}.{module}.weight", tensors[number])
        for module, tensors in ((up, ups), (down, downs), (gate, gates))
        for number in reversed(range(11))
    ]
    assert expected_checksums(weights) == {
        prefix + "w13_weight": tensor_checksum(torch.cat([gates, rows, ups, rows], dim=1)),
        prefix + "w2_weight": tensor_checksum(torch.cat([downs, rows.mT], dim=2)),
    }


def test_a_vision_language_model_has_the_engines_names_and_its_padding():
    qkv, positions, up = torch.randn(6, 2), torch.randn(16, 2), torch.randn(4, 8)
    weights = [
        ("model.visual.blocks.0.attn.qkv.weight", qkv),
        ("model.visual.pos_embed.weight", positions),
        ("model.language_model.layers.1.mlp.gate_proj.weight", up),
        ("model.language_model.layers.1.mlp.up_proj.weight", up),
    ]
    assert expected_checksums(weights) == {
        "visual.blocks.0.attn.qkv_proj.weight": tensor_checksum(qkv),
        "visual.pos_embed.weight": tensor_checksum(torch.cat([positions, torch.zeros(48, 2)])),
        "model.layers.1.mlp.gate_up_proj.weight": tensor_checksum(torch.cat([up, up])),
    }
