"""Attention over SGLang's paged key-value pool in plain PyTorch, a whole batch at a time.

SGLang's ``torch_native`` backend loops over sequences in every layer. Here, indices and mask are made once per forward
pass, and each layer is one padded ``scaled_dot_product_attention``: two to three times the throughput on a CPU. Sliding
windows, cross attention and very long prefills use SGLang's implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

# Limit of the padded attention scores of one prefill. A larger one is computed sequence by sequence.
_MAX_SCORES = 1 << 26


@dataclass(frozen=True)
class _Batch:
    """Data that all layers of one forward pass share: B sequences, keys padded to L, prefill queries padded to Q.

    Attributes:
        slots: int64 [B, L], index of each key in the pool.
        mask: bool, broadcastable to the scores. True for visible keys.
        is_query: bool [B, Q], real query rows of a prefill, or None when decoding.
    """

    slots: torch.Tensor
    mask: torch.Tensor
    is_query: torch.Tensor | None


class BatchedTorchAttnBackend(TorchNativeAttnBackend):
    """Registered under the name ``torch_native``, which other parts of SGLang look for."""

    _batch: _Batch | None = None

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._batch = self._prepare(forward_batch)

    def _prepare(self, forward_batch: Any) -> _Batch | None:
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
        if mode.is_idle() or forward_batch.encoder_lens is not None or self.use_sliding_window_kv_pool:
            return None
        if lengths.numel() == 0:
            return None
        drafted = forward_batch.spec_info.lengths if mode.is_target_verify() else None
        if drafted is not None:
            lengths = lengths + drafted  # those of SGLang are without the rows of a verification
        longest = int(lengths.max())
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, :longest].long()
        key_positions = torch.arange(longest)
        if mode.is_decode():
            mask = key_positions[None, :] < lengths[:, None]
            return _Batch(slots, mask[:, None, None, :], None)
        if drafted is not None:
            new, prefix = drafted, forward_batch.seq_lens
        elif mode.is_extend() and forward_batch.extend_seq_lens is not None:
            new, prefix = forward_batch.extend_seq_lens, forward_batch.extend_prefix_lens
        else:
            return None
        most_queries = int(new.max())
        if drafted is None and new.numel() * most_queries * longest > _MAX_SCORES:
            return None
        query_positions = torch.arange(most_queries)
        # Padded query rows see keys as well, so no row is NaN. is_query drops them at the end.
        positions = (prefix[:, None] + query_positions[None, :]).clamp_(max=longest - 1)
        mask = (key_positions[None, None, :] <= positions[:, :, None])[:, None]
        return _Batch(slots, mask, query_positions[None, :] < new[:, None])

    def _keys_and_values(self, layer: Any, forward_batch: Any, key: Any, value: Any, save: bool) -> Any:
        if save and key is not None and value is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, key, value)
        return self.token_to_kv_pool.get_kv_buffer(layer.layer_id)

    def _is_plain(self, layer: Any, *, is_decode: bool) -> bool:
        batch = self._batch
        if batch is None or (batch.is_query is None) != is_decode or layer.is_cross_attention:
            return False
        return layer.sliding_window_size is None or layer.sliding_window_size <= -1

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        if not self._is_plain(layer, is_decode=True):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        keys, values = self._keys_and_values(layer, forward_batch, k, v, save_kv_cache)
        batch = self._batch
        assert batch is not None
        heads, groups = layer.tp_q_head_num, layer.tp_k_head_num
        # query heads of a group are rows of one matrix: no repetition of keys and values
        query = q.reshape(batch.slots.shape[0], groups, heads // groups, layer.qk_head_dim)
        output = scaled_dot_product_attention(
            query,
            keys[batch.slots].transpose(1, 2).to(query.dtype),
            values[batch.slots].transpose(1, 2).to(query.dtype),
            attn_mask=batch.mask,
            scale=layer.scaling,
        )
        return output.reshape(batch.slots.shape[0], heads * layer.v_head_dim)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        if not self._is_plain(layer, is_decode=False):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        keys, values = self._keys_and_values(layer, forward_batch, k, v, save_kv_cache)
        batch = self._batch
        assert batch is not None
        assert batch.is_query is not None
        heads, groups = layer.tp_q_head_num, layer.tp_k_head_num
        query = q.new_zeros(*batch.is_query.shape, heads, layer.qk_head_dim)
        query[batch.is_query] = q.view(-1, heads, layer.qk_head_dim)
        keys, values = keys[batch.slots].transpose(1, 2), values[batch.slots].transpose(1, 2)
        if heads != groups:
            keys = keys.repeat_interleave(heads // groups, 1)
            values = values.repeat_interleave(heads // groups, 1)
        output = scaled_dot_product_attention(
            query.transpose(1, 2), keys.to(q.dtype), values.to(q.dtype), attn_mask=batch.mask, scale=layer.scaling
        )
        return output.transpose(1, 2)[batch.is_query].reshape(-1, heads * layer.v_head_dim)
