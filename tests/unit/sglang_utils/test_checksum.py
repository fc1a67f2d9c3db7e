"""Checksums of the trainer's tensors under the engine's names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from slime.backends import NamedTensor, Place
from slime.backends.sglang_utils.checksum import HostHash, SGLangTensors, read_checksums
from slime.models.shape import MlaShape
from slime.weight_sync.root_hash import RootHash

ALONE = Place(0, 1, 1)


def expected_checksums(weights: list[NamedTensor], place: Place = ALONE, **more: Any) -> dict[str, str]:
    root = RootHash(SGLangTensors(**{"num_layers": 9, "num_kv_heads": 2, "num_experts": 11} | more), [place])
    assert [name for name, _ in root.watch(weights)] == [name for name, _ in weights]
    return dict(root.checksums()[place])


def tensor_checksum(tensor: torch.Tensor) -> str:
    hasher = HostHash()
    hasher.add(tensor[None])
    return hasher.digests()[0]


def test_a_checksum_is_a_hash_of_the_bytes():
    tensor = torch.arange(5, dtype=torch.float32)
    assert tensor_checksum(tensor) == xxhash.xxh3_64(tensor.numpy().tobytes()).hexdigest()


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


def test_a_prediction_layer_is_fused_and_divided_as_the_others():
    up, down = torch.randn(128, 8), torch.randn(8, 128)
    prefix = "model.layers.9.mlp."
    weights = [(f"{prefix}gate_proj.weight", up), (f"{prefix}up_proj.weight", up), (f"{prefix}down_proj.weight", down)]
    assert expected_checksums(weights, Place(1, 2, 1)) == {
        f"draft.{prefix}gate_up_proj.weight": tensor_checksum(torch.cat([up[64:], up[64:]])),
        f"draft.{prefix}down_proj.weight": tensor_checksum(down[:, 64:]),
    }


@pytest.mark.parametrize("q_lora_rank", [6, None])
def test_latent_attention_fuses_its_down_projections_if_queries_are_compressed(q_lora_rank: int | None):
    layer, hidden = "model.layers.0.self_attn.", 8
    q, q_a, q_b, kv_a, kv_b = (torch.randn(size, hidden) for size in (16, 6, 16, 12, 20))
    named = {"q_a_proj": q_a, "q_b_proj": q_b} if q_lora_rank else {"q_proj": q}
    named |= {"kv_a_proj_with_mqa": kv_a, "kv_b_proj": kv_b}
    weights = [(f"{layer}{name}.weight", tensor) for name, tensor in named.items()]
    expected = {"kv_b_proj": kv_b[10:]}
    expected |= (
        {"fused_qkv_a_proj_with_mqa": torch.cat([q_a, kv_a]), "q_b_proj": q_b[8:]}
        if q_lora_rank
        else {"q_proj": q[8:], "kv_a_proj_with_mqa": kv_a}
    )
    assert expected_checksums(weights, Place(1, 2, 1), mla=MlaShape(q_lora_rank, 8, 8, 4, 8)) == {
        f"{layer}{name}.weight": tensor_checksum(tensor) for name, tensor in expected.items()
    }


def test_copies_of_attention_divide_it_among_fewer_ranks_and_the_embedding_too():
    layer, hidden = "model.layers.0.", 8
    q, kv, out, up, table = (torch.randn(size, hidden) for size in (16, 8, hidden, 256, 128))
    weights = [
        *((f"{layer}self_attn.{name}_proj.weight", tensor) for name, tensor in (("q", q), ("k", kv), ("v", kv))),
        (f"{layer}self_attn.o_proj.weight", out),
        (f"{layer}mlp.gate_proj.weight", up),
        (f"{layer}mlp.up_proj.weight", up),
        ("model.embed_tokens.weight", table),
        ("lm_head.weight", table),
    ]
    # rank 3 of four with two copies: the second half of attention, and the last quarter of all else
    assert expected_checksums(weights, Place(3, 4, 1, attention_copies=2)) == {
        f"{layer}self_attn.qkv_proj.weight": tensor_checksum(torch.cat([q[8:], kv[4:], kv[4:]])),
        f"{layer}self_attn.o_proj.weight": tensor_checksum(out[:, 4:]),
        f"{layer}mlp.gate_up_proj.weight": tensor_checksum(torch.cat([up[192:], up[192:]])),
        "model.embed_tokens.weight": tensor_checksum(table[64:]),
        "lm_head.weight": tensor_checksum(table[96:]),
    }
    last = expected_checksums(weights[-1:], Place(3, 4, 1, attention_copies=2, head_copies=2))
    assert last == {"lm_head.weight": tensor_checksum(table[64:])}


def test_ranks_with_the_same_content_share_one_hash():
    rules, places = SGLangTensors(9, 2, 4), [Place(rank, 4, 2, attention_copies=4) for rank in range(4)]
    prefix, tensor = "model.layers.0.", torch.randn(64, 64)

    def groups(name: str) -> list[list[int]]:
        (piece,) = rules.cuts(places)(prefix + name, tensor)
        return [[place.rank for place in group] for group in piece.shares]

    assert groups("input_layernorm.weight") == groups("self_attn.o_proj.weight") == [[0, 1, 2, 3]]
    assert groups("mlp.down_proj.weight") == [[0], [1], [2], [3]]
    assert groups("mlp.experts.2.down_proj.weight") == [[2], [3]]


def test_ranks_that_every_scheduler_reports_are_read_once():
    rank = {"parallelism_info": [{"tp_rank": 1}], "checksums": {"a.base_layer.weight": "x"}}
    first = {"parallelism_info": [{"tp_rank": 0}], "checksums": {"a.weight": "y"}}
    assert read_checksums([rank, first, rank, first]) == [(0, {"a.weight": "y"}), (1, {"a.weight": "x"})]


def test_the_checksum_of_a_gpu_is_that_of_sglangs_kernel_in_any_parts():
    """Both kernels in triton's interpreter, which must be chosen before triton is imported."""
    program = Path(__file__).with_name("gpu_checksum_cases.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["equal"] * 8
