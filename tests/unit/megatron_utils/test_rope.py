"""Rope from one table per micro-batch equals Megatron's, which computes the angles of every sequence in every layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from slime.backends.megatron_utils.model.attention import rotate, rotation
from slime.backends.training.context_parallel import zigzag_rows

LENGTHS = (8, 20, 4)


def _rotary(kind: str) -> Any:
    plain = {"rotary_percent": 1.0, "use_cpu_initialization": True, "cp_group": SimpleNamespace(size=lambda: 1)}
    match kind:
        case "yarn":
            return YarnRotaryEmbedding(16, scaling_factor=8.0, mscale=1.0, mscale_all_dim=0.7, **plain)
        case "llama3":
            return RotaryEmbedding(16, rope_scaling=True, **plain)
        case "partial":
            return RotaryEmbedding(16, **{**plain, "rotary_percent": 0.5})
        case "interleaved":
            return RotaryEmbedding(16, rotary_interleaved=True, **plain)
        case _:
            return RotaryEmbedding(16, **plain)


def _expected(x: torch.Tensor, rotary: Any, *, is_latent: bool) -> torch.Tensor:
    """Each sequence ``[L, heads, d]`` by Megatron's formula for one sequence."""
    parts = []
    for part in x.split(LENGTHS):
        found = rotary.get_emb(len(part))
        angles, factor = found if isinstance(found, tuple) else (found, 1.0)
        turned = rope_utils._apply_rotary_pos_emb_bshd(
            part.unsqueeze(1), angles, rotary.rotary_interleaved, is_latent, factor
        )
        parts.append(turned.squeeze(1))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "llama3", "partial", "interleaved", "yarn", "latent"])
def test_values_and_gradients_are_those_of_megatron(kind: str, dtype: torch.dtype) -> None:
    rotary, is_latent = _rotary(kind), kind in ("yarn", "latent")
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    table = rotation(rotary, positions, max(LENGTHS), dtype)
    x = torch.randn(len(positions), 3, 16).to(dtype)
    cotangent = torch.randn_like(x)
    results = []
    for turn in (
        lambda x: rotate(x, table, is_interleaved=rotary.rotary_interleaved, is_latent=is_latent),
        lambda x: _expected(x, rotary, is_latent=is_latent),
    ):
        given = x.clone().requires_grad_()
        out = turn(given)
        out.backward(cotangent)
        results.append((out.detach(), given.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_parallel_rank_rotates_its_rows(rank: int) -> None:
    borders = torch.tensor([0, *LENGTHS]).cumsum(0)
    rows = zigzag_rows(borders, rank, 2)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[rows]
    rotary, x = _rotary("plain"), torch.randn(sum(LENGTHS), 2, 16)
    ours = rotate(x[rows], rotation(rotary, positions, max(LENGTHS), torch.float32))
    assert torch.equal(ours, _expected(x, rotary, is_latent=False)[rows])


def test_megatrons_function_for_packed_rows_takes_the_table_and_still_its_angles() -> None:
    rotary, x = _rotary("plain"), torch.randn(sum(LENGTHS), 2, 16)
    borders = torch.tensor([0, *LENGTHS]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    table = rotation(rotary, positions, max(LENGTHS), torch.float32)
    apply = rope_utils._apply_rotary_pos_emb_thd
    stock = apply(x, borders, rotary.get_emb(max(LENGTHS)), cp_group=group)
    assert torch.equal(apply(x, borders, table, cp_group=group), stock)


def test_no_table_is_kept() -> None:
    """Megatron keeps the angles of the last 32 lengths, which offloading does not see."""
    RotaryEmbedding.forward.cache_clear()
    rotary = _rotary("plain")
    for length in range(5, 30):
        rotation(rotary, torch.arange(length), length, torch.float32)
    assert RotaryEmbedding.forward.cache_info().currsize == 0
