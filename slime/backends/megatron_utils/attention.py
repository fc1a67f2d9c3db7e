"""Causal attention over packed sequences in plain PyTorch: the core attention of every layer.

Packed ("thd") means that the tokens of all sequences lie behind one another and ``cu_seqlens`` says where each starts.
megatron-core's own local implementation refuses such input; TransformerEngine is not required here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention

from slime.utils import accelerator

__all__ = ["PackedAttention"]

_MAX_PADDING = 2.0
"""Sequences are padded to one batch while that costs at most this many times the real tokens."""


class PackedAttention(MegatronModule):
    """softmax(q k^T / sqrt(d)) v per sequence, causal; groups of query heads share a key-value head."""

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
        self._scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(k_channels or config.kv_channels)
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if getattr(config, "window_size", None) is not None:
            raise ValueError("--window-size is not supported: packed attention sees every earlier token.")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query [t, heads, d], key and value [t, groups, d] -> [t, heads * d]; without packing [s, b, ...]."""
        if packed_seq_params is None:
            parts = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            return self._attend(*parts).permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)
        if not accelerator.current().is_cpu:
            return self._variable_length(query, key, value, packed_seq_params).reshape(query.size(0), -1)
        cu_seqlens = packed_seq_params.cu_seqlens_q
        lengths = cu_seqlens.diff()
        longest = int(packed_seq_params.max_seqlen_q)
        if lengths.numel() * longest <= _MAX_PADDING * query.size(0):
            output = self._padded(query, key, value, lengths, longest)
        else:
            output = self._one_by_one(query, key, value, cu_seqlens.tolist())
        return output.reshape(query.size(0), -1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[b, heads, s, d] each. Causal: a row sees itself and everything before, so padding behind it has no effect."""
        dropout = self._dropout if self.training else 0.0
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self._scale, enable_gqa=True, dropout_p=dropout
        )

    def _padded(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """All sequences as one batch, padded behind to the longest."""
        is_token = torch.arange(longest, device=lengths.device)[None, :] < lengths[:, None]

        def pad(packed: torch.Tensor) -> torch.Tensor:
            batch = packed.new_zeros(*is_token.shape, *packed.shape[1:])
            batch[is_token] = packed
            return batch.transpose(1, 2)

        output = self._attend(pad(query), pad(key), pad(value))
        return output.transpose(1, 2)[is_token]

    def _one_by_one(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: list[int]
    ) -> torch.Tensor:
        outputs = []
        for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            parts = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
            outputs.append(self._attend(*parts)[0].transpose(0, 1))
        return torch.cat(outputs)

    def _variable_length(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_seq_params: Any
    ) -> torch.Tensor:
        """torch's own kernel for packed sequences; it has no CPU implementation and no dropout."""
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = packed_seq_params.cu_seqlens_q, int(packed_seq_params.max_seqlen_q)
        return varlen_attn(
            query,
            key,
            value,
            starts,
            starts,
            longest,
            longest,
            scale=self._scale,
            window_size=(-1, 0),
            enable_gqa=query.size(1) != key.size(1),
        )
