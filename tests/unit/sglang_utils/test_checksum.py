"""Checksums of the trainer's tensors under the engine's names."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.protocols import NamedTensor, Place
from slime.backends.sglang_utils.checksum import SGLangTensors, Sha256
from slime.weight_sync.root_hash import RootHash

ALONE = Place(0, 1, 1)


def expected_checksums(weights: list[NamedTensor], place: Place = ALONE, **more: Any) -> dict[str, str]:
    root = RootHash(SGLangTensors(**{"num_layers": 9, "num_kv_heads": 2, "num_experts": 11} | more), [place])
    assert [name for name, _ in root.watch(weights)] == [name for name, _ in weights]
    return dict(root.checksums()[place])


def tensor_checksum(tensor: torch.Tensor) -> str:
    hasher = Sha256()
    hasher.add(tensor)
    return hasher.digest()


def test_a_checksum_is_the_start_of_the_sha256_of_the_bytes():
    tensor = torch.arange(5, dtype=torch.float32)
    assert tensor_checksum(tensor) == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def test_a_checksum_does_not_depend_on_strides():
    tensor = torch.randn(4, 3)
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous())


def test_a_tensor_can_be_offloaded_after_its_checksum():
    tensor = torch.randn(4)
    tensor_checksum(tensor)
    tensor.untyped_storage().resize_(0)  # refused for a tensor that has ever been an array of numpy()
    assert tensor.untyped_storage().nbytes() == 0


def test_projections_are_combined_as_the_engine_keeps_them_whatever_their_order():
    q, k, v = (torch.randn(4, 8) for _ in range(3))
    gate, up, down = torch.randn(32, 8), torch.randn(32, 8), torch.randn(8, 32)
    layer = "model.layers.3."
    weights = [
        (layer + "self_attn.v_proj.weight", v),
        (layer + "mlp.up_proj.weight", up),
        (layer + "self_attn.q_proj.weight", q),
        (layer + "self_attn.k_proj.weight", k),
        (layer + "mlp.gate_proj.weight", gate),
        (layer + "mlp.down_proj.weight", down),
    ]
    assert expected_checksums(weights) == {
        layer + "self_attn.qkv_proj.weight": tensor_checksum(torch.cat([q, k, v])),
        layer + "mlp.gate_up_proj.weight": tensor_checksum(torch.cat([gate, up])),
        layer + "mlp.down_proj.weight": tensor_checksum(down),
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
    qkv, positions, up = torch.randn(6, 2), torch.randn(16, 2), torch.randn(32, 8)
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


def test_tensor_parallel_ranks_hold_rows_heads_columns_and_rows_of_the_vocabulary():
    hidden, layer = 8, "model.layers.0."
    q, k, v = torch.randn(16, hidden), torch.randn(4, hidden), torch.randn(4, hidden)
    out, bias, norm, table = torch.randn(hidden, 16), torch.randn(hidden), torch.randn(hidden), torch.randn(100, 3)
    weights = [
        (layer + "self_attn.q_proj.weight", q),
        (layer + "self_attn.k_proj.weight", k),
        (layer + "self_attn.v_proj.weight", v),
        (layer + "self_attn.o_proj.weight", out),
        (layer + "self_attn.o_proj.bias", bias),
        (layer + "input_layernorm.weight", norm),
        ("lm_head.weight", table),
    ]
    # four ranks and two heads of keys: ranks 2 and 3 hold the second one
    assert expected_checksums(weights, Place(3, 4, 1)) == {
        layer + "self_attn.qkv_proj.weight": tensor_checksum(torch.cat([q[12:], k[2:], v[2:]])),
        layer + "self_attn.o_proj.weight": tensor_checksum(out[:, 12:]),
        layer + "self_attn.o_proj.bias": tensor_checksum(bias),
        layer + "input_layernorm.weight": tensor_checksum(norm),
        "lm_head.weight": tensor_checksum(torch.cat([table, torch.zeros(28, 3)])[96:]),
    }


def test_ranks_with_a_block_of_the_experts_divide_the_inner_size_among_themselves():
    prefix, gate, up = "model.layers.0.mlp.experts.", torch.randn(4, 128, 8), torch.randn(4, 128, 8)
    weights = [
        (f"{prefix}{number}.{module}.weight", tensors[number])
        for number in range(4)
        for module, tensors in (("gate_proj", gate), ("up_proj", up))
    ]
    # rank 2 of four, two blocks: the first half of experts 2 and 3
    own = torch.cat([gate[2:, :64], up[2:, :64]], dim=1)
    assert expected_checksums(weights, Place(2, 4, 2), num_experts=4) == {prefix + "w13_weight": tensor_checksum(own)}


def test_a_vision_tower_divides_queries_keys_and_values_by_itself():
    qkv = torch.randn(12, 2)
    parts = torch.cat([part[2:] for part in qkv.chunk(3)])
    assert expected_checksums([("model.visual.blocks.0.attn.qkv.weight", qkv)], Place(1, 2, 1)) == {
        "visual.blocks.0.attn.qkv_proj.weight": tensor_checksum(parts)
    }


def test_prediction_layers_are_those_of_a_draft_and_parts_of_quantized_tensors_are_left_out():
    tensor = torch.randn(4, 4)
    weights = [
        ("model.layers.9.eh_proj.weight", tensor),
        ("model.layers.1.mlp.down_proj.weight", tensor.to(torch.float8_e4m3fn)),
        ("model.layers.1.mlp.down_proj.weight_scale_inv", tensor),
    ]
    assert list(expected_checksums(weights)) == ["draft.model.layers.9.eh_proj.weight"]


def test_the_checksum_of_a_gpu_is_that_of_sglangs_kernel_in_any_parts():
    """Both kernels in triton's interpreter, which must be chosen before triton is imported."""
    program = Path(__file__).with_name("gpu_checksum_cases.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["equal"] * 4
