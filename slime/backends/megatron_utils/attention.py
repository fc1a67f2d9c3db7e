"""Core attention over packed sequences, without TransformerEngine.

Plugged into Megatron's layer spec by ``model``; called by Megatron's ``SelfAttention`` with roped queries, keys and
values ``[t, heads, head_dim]`` ("thd": all sequences of a micro-batch behind one another). Causal within a sequence,
blind across sequences.

On cuda in 16 bit: torch's variable-length flash attention. Otherwise SDPA: sequences of about the same length share one
padded call, since hundreds of calls for short sequences cost more than the padding; a long one has a call of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from slime.utils import accelerator

__all__ = ["PackedAttention", "PackedSegments", "packed_segments"]

_SHORT = 32
"""Up to this many tokens of difference in length sequences share a padded call; else up to a quarter."""


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with a plan for padded attention that all layers share."""

    @functools.cached_property
    def plan(self) -> PaddingPlan:
        return _plan(self.cu_seqlens_q.tolist(), self.cu_seqlens_q.device)


def packed_segments(cu_seqlens: torch.Tensor, max_seqlen: int) -> PackedSegments:
    """``cu_seqlens`` int32 ``[S + 1]``: where each segment starts, and the end of the last."""
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )


@dataclass(frozen=True)
class PaddingPlan:
    """How ``[t, ...]`` becomes padded batches and comes back.

    Attributes:
        shapes: (segments, padded length) of every batch.
        source: int64 [P], for each padded position the packed position it copies; padding copies its segment's start.
        target: int64 [t], for each packed position its padded position.
        is_real: bool [P], false on padding.
    """

    shapes: tuple[tuple[int, int], ...]
    source: torch.Tensor
    target: torch.Tensor
    is_real: torch.Tensor


def _plan(starts: list[int], device: torch.device) -> PaddingPlan:
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    groups: list[list[int]] = []
    for segment in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest - lengths[segment] <= max(_SHORT, longest // 4):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    sources, reals, shapes = [], [], []
    for group in groups:
        longest = lengths[group[0]]
        begin = torch.tensor([starts[segment] for segment in group])[:, None]
        length = torch.tensor([lengths[segment] for segment in group])[:, None]
        offset = torch.arange(longest)[None]
        is_real = offset < length
        sources.append(torch.where(is_real, begin + offset, begin).flatten())
        reals.append(is_real.flatten())
        shapes.append((len(group), longest))
    source, is_real = torch.cat(sources), torch.cat(reals)
    target = torch.empty(starts[-1], dtype=torch.int64)
    target[source[is_real]] = torch.arange(len(source))[is_real]
    return PaddingPlan(tuple(shapes), source.to(device), target.to(device), is_real.to(device))


class _Pad(torch.autograd.Function):
    """``x[source]``. No gradient comes from padding, so backward is a gather as well and not a slow scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: PaddingPlan) -> torch.Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.source)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.plan.target), None


class _Unpad(torch.autograd.Function):
    """``x[target]``; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: PaddingPlan) -> torch.Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.target)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        padded = grad.index_select(0, ctx.plan.source)
        return padded.masked_fill_(~ctx.plan.is_real[:, None, None], 0.0), None


class PackedAttention(MegatronModule):
    """Drop-in for Megatron's ``DotProductAttention``, which refuses packed sequences. Has no parameters."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.window_size is not None or getattr(config, "softmax_type", "vanilla") != "vanilla":
            raise NotImplementedError("sliding windows and attention sinks are not supported")
        if config.context_parallel_size > 1:
            raise NotImplementedError("context parallelism is not supported")
        channels = k_channels or config.kv_channels
        self._scale = 1.0 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
    ) -> torch.Tensor:
        """query ``[t, heads, d]``, key and value ``[t, groups, d]`` -> ``[t, heads * d]``."""
        if packed_seq_params is None:
            raise ValueError("the model is only called with packed sequences")
        dropout = self._dropout if self.training else 0.0
        if dropout == 0.0 and _has_varlen_kernel(query.dtype):
            out = self._varlen(query, key, value, packed_seq_params)
        else:
            out = self._padded(query, key, value, packed_seq_params.plan, dropout)
        return out.reshape(out.size(0), -1)

    def _varlen(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: PackedSegments) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cu_seqlens, longest = segments.cu_seqlens_q, segments.max_seqlen_q
        return varlen_attn(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            scale=self._scale,
            window_size=(-1, 0),  # causal
            enable_gqa=q.size(1) != k.size(1),
        )

    def _padded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PaddingPlan, dropout: float
    ) -> torch.Tensor:
        heads = q.size(1)
        padded = _Pad.apply(torch.cat([q, k, v], dim=1), plan)
        outputs, begin = [], 0
        for num_segments, length in plan.shapes:
            end = begin + num_segments * length
            batch = padded[begin:end].view(num_segments, length, padded.size(1), padded.size(2)).transpose(1, 2)
            out = F.scaled_dot_product_attention(
                *batch.split([heads, k.size(1), v.size(1)], dim=1),
                is_causal=True,  # a query never sees the padding behind its segment
                dropout_p=dropout,
                scale=self._scale,
                enable_gqa=True,
            )
            outputs.append(out.transpose(1, 2).reshape(num_segments * length, heads, -1))
            begin = end
        return _Unpad.apply(outputs[0] if len(outputs) == 1 else torch.cat(outputs), plan)


def _has_varlen_kernel(dtype: torch.dtype) -> bool:
    return not accelerator.current().is_cpu and dtype in (torch.bfloat16, torch.float16) and _varlen_is_importable()


@functools.cache
def _varlen_is_importable() -> bool:
    try:
        import torch.nn.attention.varlen  # noqa: F401
    except ImportError:
        return False
    return True
