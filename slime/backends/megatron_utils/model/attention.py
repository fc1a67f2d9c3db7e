"""Our packed attention as Megatron's core attention, and how a micro-batch is described to Megatron's model.

Plugged into the layer spec by ``layer_specs``. Megatron's ``SelfAttention`` calls it with roped queries, keys and
values ``[t, heads, head_dim]``. The kernel is ``slime.backends.training.attention``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from slime.backends.training.attention import AttentionPlan, packed_attention, plan_attention
from slime.backends.training.data import MicroBatch
from slime.backends.training.media import Media


@dataclass
class DeepFeatures:
    """Additions to the outputs of the first decoder layers: ``values[layer]`` ``[f, h]``, to the rows ``[f]``."""

    rows: torch.Tensor
    values: list[torch.Tensor]


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what our model needs and a plan that all layers share.

    Attributes:
        head_rows: ``[n]`` rows of this rank that go through the LM head. None means all.
        cp_rank, cp_size, cp_group: context parallelism. ``cu_seqlens`` describe the whole micro-batch.
        prediction_mask: ``[1, t]`` trained tokens of the multi-token-prediction layers, aligned with the logits. None
            switches the layers off. ``vocab_size``: ids without padding, required by them. ``prediction_losses``: per
            depth fp32 [2], the sum over this rank's tokens and their number.
        chosen_keys: the choices of sparse attention by number of the indexer's layer, see ``sparse_attention``.
        media: images and videos among the tokens, or None. ``deep_features``: their features for the first layers on
            this rank, see ``vision_model``.
    """

    head_rows: torch.Tensor | None = None
    cp_rank: int = 0
    cp_size: int = 1
    prediction_mask: torch.Tensor | None = None
    vocab_size: int | None = None
    prediction_losses: list[torch.Tensor] = field(default_factory=list)
    chosen_keys: dict[int, torch.Tensor | None] = field(default_factory=dict)
    media: Media | None = None
    deep_features: DeepFeatures | None = None

    @functools.cached_property
    def plan(self) -> AttentionPlan:  # once per micro-batch, for all layers
        assert self.cu_seqlens_q is not None, "packed_segments sets it"
        return plan_attention(self.cu_seqlens_q, self.cp_rank, self.cp_size)


def packed_segments(
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    head_rows: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    cp_group: Any = None,
) -> PackedSegments:
    """``cu_seqlens`` int32 ``[S + 1]``: the start of each segment, and the end of the last."""
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cp_group=cp_group,
        head_rows=head_rows,
        cp_rank=cp_rank,
        cp_size=cp_size,
    )


def segments_of(micro_batch: MicroBatch, *, prediction_vocab: int | None = None) -> PackedSegments:
    """``micro_batch`` as Megatron's model reads it.

    Args:
        prediction_vocab: ids without padding. If given, multi-token-prediction layers learn from the trained tokens.
    """
    packed, sharding = micro_batch.packed, micro_batch.sharding
    segments = packed_segments(
        packed.cu_seqlens,
        packed.max_seqlen,
        head_rows=micro_batch.head_rows,
        cp_rank=sharding.cp_rank,
        cp_size=sharding.cp_size,
        cp_group=sharding.cp_group,
    )
    segments.media = micro_batch.media
    if prediction_vocab is not None:
        segments.prediction_mask, segments.vocab_size = micro_batch.trained, prediction_vocab
    return segments


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
        out = packed_attention(
            query,
            key,
            value,
            packed_seq_params.plan,
            scale=self._scale,
            dropout=dropout,
            cp_group=packed_seq_params.cp_group if packed_seq_params.cp_size > 1 else None,
        )
        return out.reshape(out.size(0), -1)


class LatentAttention(PackedAttention):
    """Core attention for values narrower than queries and keys: pads values with zero columns."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._value_width: int = config.v_head_dim

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """query and key ``[t, heads, d]``, value ``[t, heads, d_v]`` with d_v <= d -> ``[t, heads * d_v]``."""
        # Zero columns of the values only add zero columns to the output, which are cut off below.
        padded = F.pad(value, (0, query.size(-1) - value.size(-1)))
        out = super().forward(query, key, padded, *args, **kwargs)
        return out.view(out.size(0), -1, query.size(-1))[..., : self._value_width].flatten(1)
