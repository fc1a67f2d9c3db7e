"""Fusing, cutting and their inverses, for every way in which the families' tables make a tensor."""

from __future__ import annotations

import itertools

import pytest
import torch

from slime.backends.megatron_utils.checkpoint.tensors import (
    Dimensions,
    from_megatron,
    full_shape,
    join,
    shard,
    to_megatron,
)
from slime.models.family import Rule, families

_SIZE = Dimensions(
    num_query_groups=4, head_dim=3, vocab_size=10, num_key_heads=4, num_value_heads=8, key_dim=3, value_dim=2
)
_PARTS = {
    "copy": [(8, 12)],
    "swapped_columns": [(8, 12)],
    "vocab": [(10, 5)],
    "gate_up": [(8, 5), (8, 5)],
    "qkv": [(24, 5), (12, 5), (12, 5)],
    "gated_qkv": [(48, 5), (12, 5), (12, 5)],
}


def _kinds() -> list[Rule]:
    """One rule of each kind that any table has."""
    found = {(rule.layout, rule.split, len(rule.hf)): rule for family in families().values() for rule in family.rules}
    return list(found.values())


def _parts(rule: Rule) -> list[torch.Tensor]:
    if rule.layout == "by_key_head":
        shapes = [(4 * sum(map(_SIZE.rows, sections)), 5) for sections in rule.sections]
    else:
        shapes = _PARTS[rule.layout] if len(rule.hf) > 1 or rule.layout != "gate_up" else [(16, 5)]
    numbers = itertools.count()
    return [torch.tensor([float(next(numbers)) for _ in range(a * b)]).view(a, b) for a, b in shapes]


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("rule", _kinds(), ids=lambda rule: f"{rule.layout}-{rule.split}-{len(rule.hf)}")
def test_what_is_fused_and_cut_comes_back_bit_for_bit(rule: Rule, num_shards: int) -> None:
    parts = _parts(rule)
    whole = to_megatron(parts, rule, _SIZE, num_rows=16)
    shards = [shard(whole, rule, rank, num_shards) for rank in range(num_shards)]
    assert all(full_shape(one.shape, rule, num_shards) == list(whole.shape) for one in shards)
    assert torch.equal(join(shards, rule), whole)
    back = from_megatron(join(shards, rule), rule, _SIZE)
    assert len(back) == len(parts)
    assert all(torch.equal(one, part) for one, part in zip(back, parts, strict=True))


def test_a_rank_has_its_own_share_of_gate_and_of_up() -> None:
    rule = Rule("mlp.linear_fc1.weight", ("gate", "up"), "gate_up", "column")
    gate, up = torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]
    second = shard(to_megatron([gate, up], rule, _SIZE, 8), rule, 1, 2)
    assert second.flatten().tolist() == [2, 3, 12, 13]


def test_a_rank_has_whole_groups_of_query_heads_with_their_key_and_value() -> None:
    """4 groups of 2 query heads, each head 3 rows."""
    rule = Rule("self_attention.linear_qkv.weight", ("q", "k", "v"), "qkv", "column")
    query = torch.arange(24.0)[:, None]
    key, value = 100 + torch.arange(12.0)[:, None], 200 + torch.arange(12.0)[:, None]
    last = shard(to_megatron([query, key, value], rule, _SIZE, 48), rule, 3, 4)
    assert last.flatten().tolist() == [*range(18, 24), *range(109, 112), *range(209, 212)]


def test_a_rank_has_the_output_gates_of_its_query_heads() -> None:
    """4 groups of 2 query heads. Each head has 3 query rows, then 3 gate rows."""
    rule = Rule("self_attention.linear_qkv.weight", ("q", "k", "v"), "gated_qkv", "column")
    query = torch.arange(48.0)[:, None]
    key, value = 100 + torch.arange(12.0)[:, None], 200 + torch.arange(12.0)[:, None]
    first = shard(to_megatron([query, key, value], rule, _SIZE, 72), rule, 0, 4)
    queries, gates = [0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]
    assert first.flatten().tolist() == [*queries, *gates, 100, 101, 102, 200, 201, 202]


def test_a_rank_has_all_rows_of_its_key_heads_of_a_delta_net() -> None:
    """4 key heads of 3 rows, each with 2 value heads of 2 rows."""
    rule = Rule("conv1d.weight", ("conv1d",), "by_key_head", "column", ((("q",), ("k",), ("v",)),))
    second = shard(to_megatron([torch.arange(40.0)[:, None]], rule, _SIZE, 40), rule, 1, 4)
    assert second.flatten().tolist() == [3, 4, 5, 15, 16, 17, 28, 29, 30, 31]


def test_the_padding_of_the_vocabulary_is_zero_and_does_not_come_back() -> None:
    rule = Rule("output_layer.weight", ("lm_head.weight",), "vocab", "column")
    head = torch.ones(10, 2)
    whole = to_megatron([head], rule, _SIZE, num_rows=16)
    assert whole.shape == (16, 2)
    assert torch.all(whole[10:] == 0)
    assert torch.equal(from_megatron(whole, rule, _SIZE)[0], head)


def test_halves_of_a_swapped_projection_change_places() -> None:
    row, rule = torch.arange(4.0)[None], Rule("eh_proj.weight", ("proj",), "swapped_columns")
    assert to_megatron([row], rule, _SIZE, 1).tolist() == [[2, 3, 0, 1]]
