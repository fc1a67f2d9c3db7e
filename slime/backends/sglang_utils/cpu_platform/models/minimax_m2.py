"""SGLang's MiniMax-M2 on a CPU: its norm over all heads together is a triton kernel there, and is torch here."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.models import minimax_m2

__all__ = ["EntryClass", "MiniMaxM2ForCausalLM", "normalise", "sums_of_squares"]


class MiniMaxM2ForCausalLM(minimax_m2.MiniMaxM2ForCausalLM):
    """SGLang's registry looks models up by the name of their class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        minimax_m2.rms_sumsq_serial = sums_of_squares
        minimax_m2.rms_apply_serial = normalise
        super().__init__(*args, **kwargs)


def sums_of_squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``[t, width]`` each -> fp32 ``[t, 2]``, which tensor-parallel ranks add up."""
    return torch.stack([rows.float().square().sum(-1) for rows in (query, key)], dim=-1)


def normalise(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    sums: torch.Tensor,
    num_ranks: int,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, divided by the root of the mean square over the heads of all ranks."""
    normed = []
    for index, (rows, weight) in enumerate(((query, query_weight), (key, key_weight))):
        mean = sums[:, index : index + 1] / (weight.numel() * num_ranks)
        normed.append((rows.float() * torch.rsqrt(mean + epsilon) * weight.float()).to(rows.dtype))
    return normed[0], normed[1]


EntryClass = [MiniMaxM2ForCausalLM]
