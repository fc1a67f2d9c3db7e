"""The models that an engine on a CPU can serve, under the names of SGLang's registry.

SGLang imports every module of this package. The import of SGLang's whole registry would take seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.models import minimax_m2
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration


class MiniMaxM2ForCausalLM(minimax_m2.MiniMaxM2ForCausalLM):
    """MiniMax-M2 with torch functions instead of the triton kernels of the norm over all heads."""

    # SGLang's registry finds models by the name of their class, so this class has the name of its base.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        minimax_m2.rms_sumsq_serial = sums_of_squares
        minimax_m2.rms_apply_serial = normalize
        super().__init__(*args, **kwargs)


def sums_of_squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Sums over ``[t, width]`` each, as fp32 ``[t, 2]``. Tensor-parallel ranks add them up."""
    return torch.stack([rows.float().square().sum(-1) for rows in (query, key)], dim=-1)


def normalize(
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
        # the weight has the width of this rank, the sums are over all ranks
        mean = sums[:, index : index + 1] / (weight.numel() * num_ranks)
        normed.append((rows.float() * torch.rsqrt(mean + epsilon) * weight.float()).to(rows.dtype))
    return normed[0], normed[1]


EntryClass = [
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3VLForConditionalGeneration,
    MiniMaxM2ForCausalLM,
]
