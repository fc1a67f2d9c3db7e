"""Packed attention against a plain loop over segments, heads and queries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.model.attention import PackedAttention, packed_segments
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.operators import Operators
from tests.verification import plain_attention, verify


def _attention(**overrides: Any) -> PackedAttention:
    config = {"window_size": None, "softmax_type": "vanilla", "kv_channels": 8, "attention_dropout": 0.0}
    return PackedAttention(SimpleNamespace(**(config | overrides)), layer_number=1)


@pytest.mark.parametrize(
    "lengths",
    [[7], [1], [5, 5, 5], [3, 1, 12, 7, 2], [90, 1, 100, 30, 64, 2, 31], [1, 200]],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_outputs_and_gradients_equal_a_plain_loop(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(lengths), heads, 8) for heads in (4, 2, 2)]
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    naive = [x.detach().clone().requires_grad_() for x in ours]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    out = _attention()(*ours, packed_seq_params=packed_segments(cu_seqlens, max(lengths)))
    reference = plain_attention(*naive, lengths)
    verify("packed attention", "a loop over queries", out, reference, tolerance=2e-6)
    weight = torch.randn(out.shape, generator=generator)
    (out * weight).sum().backward()
    (reference * weight).sum().backward()
    for mine, other in zip(ours, naive, strict=True):
        verify("gradients of packed attention", "a loop over queries", mine.grad, other.grad, tolerance=1e-5)


@pytest.mark.parametrize(("lengths", "copies"), [([9], 0), ([5, 5, 5], 0), ([5, 4], 8), ([4, 5], 8)])
def test_rows_are_copied_only_if_sequences_differ_in_length(lengths: list[int], copies: int) -> None:
    inputs = [torch.randn(sum(lengths), 2, 8, requires_grad=True) for _ in "qkv"]
    segments = packed_segments(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
    with Operators() as operators:
        _attention()(*inputs, packed_seq_params=segments).sum().backward()
    assert operators.names.count("aten::index_select") == copies


def test_hundreds_of_short_segments_share_one_call_and_a_long_one_stands_alone() -> None:
    lengths = [20 + i % 9 for i in range(200)] + [500]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    batches = packed_segments(cu_seqlens, 500).plan.padding.batches
    assert [batch.shape for batch in batches] == [(1, 500, 500), (200, 28, 28)]


def test_what_it_cannot_do_is_refused_when_the_model_is_built() -> None:
    with pytest.raises(ConfigError, match=r"--window-size.* sliding windows"):
        _attention(window_size=(128, 0))
