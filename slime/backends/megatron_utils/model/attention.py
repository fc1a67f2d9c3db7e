"""Our packed attention as Megatron's core attention, and how a micro-batch is described to Megatron's model.

Plugged into the layer spec by ``layer_specs``. Megatron's ``SelfAttention`` calls it with roped queries, keys and
values ``[t, heads, head_dim]``. The kernel is ``slime.backends.training.attention``.

Rotary position embedding is that of arXiv 2104.09864. Megatron computes cosines and sines in every layer, from lengths
that it copies to the host: each copy waits for the device. Here :func:`rotation` makes them once from the positions of
this rank's rows, and the table travels through Megatron's layers as ``rotary_pos_emb``. ``patches.install`` makes
Megatron's function for packed rows call :func:`rotate`. :class:`Sequences` is for layers that carry a state from token
to token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from slime.backends.training.attention import AttentionPlan, packed_attention, plan_attention
from slime.backends.training.context_parallel import gather_rows, zigzag_rows
from slime.backends.training.data import MicroBatch
from slime.backends.training.media import Media
from slime.batch.packing import copy_to
from slime.utils.errors import ConfigError

CHUNK = 64
"""Tokens of a matrix product."""


def rotation(rotary: Any, positions: torch.Tensor, max_seqlen: int, dtype: torch.dtype) -> torch.Tensor:
    """The table ``[2, t, d]`` for d rotated columns: cosines, and sines with the signs that :func:`rotate` needs.

    Args:
        rotary: Megatron's module, of any scaling.
        positions: int64 ``[t]`` of this rank's rows within their sequences.
        max_seqlen: above all positions.
    """
    # not ``forward``, which keeps the angles of the last 32 lengths
    found = rotary.get_emb(max_seqlen)
    angles, amplitude = found if isinstance(found, tuple) else (found, 1.0)  # YaRN has an amplitude
    rows = angles.flatten(1).index_select(0, positions)
    return table_of(rows, dtype, is_interleaved=rotary.rotary_interleaved, amplitude=amplitude)


def table_of(
    angles: torch.Tensor, dtype: torch.dtype, *, is_interleaved: bool = False, amplitude: float = 1.0
) -> torch.Tensor:
    """fp32 angles ``[t, d]``, each twice: in both halves, or in neighboring columns -> ``[2, t, d]``."""
    cosines, sines = ((part * amplitude).to(dtype) for part in (angles.cos(), angles.sin()))
    if is_interleaved:
        sines[:, 0::2].neg_()
    else:
        sines[:, : sines.size(1) // 2].neg_()
    return torch.stack([cosines, sines])


def rotate(
    x: torch.Tensor, table: torch.Tensor, *, is_interleaved: bool = False, is_latent: bool = False
) -> torch.Tensor:
    """``x`` ``[t, heads, c]`` with its first d columns rotated, d <= c.

    Args:
        table: ``[2, t, d]`` of :func:`table_of`.
        is_interleaved: neighboring columns form a pair. Otherwise one column of either half.
        is_latent: latent attention: neighbors form a pair and move into the halves.
    """
    width = table.size(-1)
    turned, kept = x[..., :width], x[..., width:]
    if is_latent:
        turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
    pairs = turned.unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
    partners = pairs.flip(-1 if is_interleaved else -2).flatten(-2)
    cosines, sines = table.to(x.dtype).unsqueeze(2)
    turned = turned * cosines + partners * sines
    return torch.cat([turned, kept], dim=-1) if kept.size(-1) else turned


class Sequences:
    """Made on the host, once per micro-batch, and copied without a wait for the device.

    Attributes:
        count: S sequences.
        cu_seqlens: int64 ``[S + 1]`` where each sequence starts, and t. Kernels keep tables for this object.
        number: int64 ``[t]`` of each token's sequence.
        chunk_size: sequences are cut into chunks of so many tokens. The chunks are sorted by their number within the
            sequence, those with the same number by the length of the sequence, longest first.
        chunks: how many there are of each number.
        slots: int64 ``[t]`` place of each token in the row of chunks, each with ``chunk_size`` places.
        by_rank: int64 ``[t]`` the token at each place if the tokens of context-parallel ranks follow one another.
        by_token: the inverse.
    """

    def __init__(
        self, borders: Sequence[int], device: torch.device, *, cp_size: int = 1, chunk_size: int = CHUNK
    ) -> None:
        """``borders``: ``cu_seqlens`` on the host."""
        starts = torch.tensor(borders)
        lengths = starts.diff()
        number = torch.arange(len(lengths)).repeat_interleave(lengths)
        self.count, self.chunk_size = len(lengths), chunk_size
        self.cu_seqlens, self.number = copy_to(starts, device), copy_to(number, device)
        slots, self.chunks = _chunk_layout(starts, number, chunk_size)
        self.slots = copy_to(slots, device)
        if cp_size > 1:
            by_rank = torch.cat([zigzag_rows(starts, rank, cp_size) for rank in range(cp_size)])
            self.by_rank, self.by_token = copy_to(by_rank, device), copy_to(by_rank.argsort(), device)

    @property
    def first_chunks(self) -> list[int]:
        """Index of the first chunk of each number."""
        return list(accumulate(self.chunks[:-1], initial=0)) if self.chunks else []


def _chunk_layout(starts: torch.Tensor, number: torch.Tensor, size: int) -> tuple[torch.Tensor, list[int]]:
    chunks = (starts.diff() + size - 1) // size
    order = chunks.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel())
    counts = (chunks[:, None] > torch.arange(int(chunks.max()) if chunks.numel() else 0)).sum(0)
    first = counts.cumsum(0) - counts
    position = torch.arange(number.numel()) - starts[:-1][number]
    slots = (first[position // size] + rank[number]) * size + position % size
    return slots, counts.tolist()


class RowCounts(torch.Tensor):
    """How many samples have each row, int32, in place of Megatron's mask of padding.

    Megatron's routers multiply their counts and averages by ``~mask``. With these numbers instead, losses of routers
    and loads of experts are those of separate samples.
    """

    def bool(self) -> RowCounts:  # type: ignore[override]
        """The same: Megatron converts masks."""
        return self

    def __invert__(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


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
        borders: ``cu_seqlens`` on the host. Without them ``prepare`` waits for the device.
        shared: tokens that each sample shares with the one before it, or None.
        is_padding: bool ``[1, t]`` rows that routers do not count, or None. A tensor rank's slice of them with sequence
            parallelism. With shared prefixes the number of samples that have each row.
        sequences: tables for gated delta nets, or None if the model has none.
        latent_plan: the plan for keys that :class:`LatentSelfAttention` has gathered. None on one rank.
        pad_between_seqs: for Transformer Engine's attention: padding is a segment, not a gap between segments.
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
    borders: tuple[int, ...] | None = None
    shared: tuple[int, ...] | None = None
    is_padding: torch.Tensor | None = None
    sequences: Sequences | None = None
    latent_plan: AttentionPlan | None = None
    pad_between_seqs: bool = False
    _positions: torch.Tensor | None = None
    _rotation: torch.Tensor | None = None

    def prepare(self, position_ids: torch.Tensor, config: Any) -> None:
        """Make what all layers share, before the first of them. ``position_ids`` ``[1, t]`` of this rank's rows."""
        self._positions = position_ids.view(-1)
        slices = _slices(config)
        if self.is_padding is not None and self.is_padding.size(1) == self._positions.size(0) and slices > 1:
            self.is_padding = self.is_padding.chunk(slices, dim=1)[mpu.get_tensor_model_parallel_rank()]
        plan = self.plan
        if config.multi_latent_attention and self.cp_size > 1:
            plan = self.latent_plan = plan.in_slices(slices)
        plan.prepare()
        if config.linear_attention_freq is not None:
            self.sequences = Sequences(self._host_borders, position_ids.device, cp_size=self.cp_size)

    def rotation(self, rotary: Any, dtype: torch.dtype) -> torch.Tensor:
        """The table of rope for this rank's rows, see ``rope``. All layers have an equal ``rotary``."""
        if self._rotation is None:
            assert self._positions is not None, "the model calls prepare"
            assert self.max_seqlen_q is not None, "packed_segments sets it"
            self._rotation = rotation(rotary, self._positions, self.max_seqlen_q, dtype)
        return self._rotation

    @functools.cached_property
    def plan(self) -> AttentionPlan:  # once per micro-batch, for all layers
        assert self.cu_seqlens_q is not None, "packed_segments sets it"
        device = self.cu_seqlens_q.device
        return plan_attention(self._host_borders, self.cp_rank, self.cp_size, device=device, shared=self.shared)

    @functools.cached_property
    def _host_borders(self) -> Sequence[int]:
        assert self.cu_seqlens_q is not None, "packed_segments sets it"
        return self.borders or self.cu_seqlens_q.tolist()


def _slices(config: Any) -> int:
    return mpu.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1


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
        # Transformer Engine's ring asks for them
        cu_seqlens_q_padded=cu_seqlens if cp_size > 1 else None,
        cu_seqlens_kv_padded=cu_seqlens if cp_size > 1 else None,
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
    segments.borders, segments.is_padding, segments.shared = packed.borders, packed.is_padding, packed.shared
    if packed.num_holders is not None:
        segments.is_padding = packed.num_holders.as_subclass(RowCounts)
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
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise ConfigError("omit --window-size and --softmax-type: attention here has no sliding windows or sinks.")
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
        """query ``[t, heads, d]``, key ``[t, groups, d]``, value ``[t, groups, v]`` -> ``[t, heads * v]``.

        Keys and values of latent attention are those of all context-parallel ranks, see ``latent_plan``.
        """
        if packed_seq_params is None:
            raise ValueError("the model is only called with packed sequences")
        segments, plan = packed_seq_params, packed_seq_params.latent_plan
        has_all_keys = segments.cp_size == 1 or plan is not None
        out = packed_attention(
            query,
            key,
            value,
            plan or segments.plan,
            scale=self._scale,
            dropout=self._dropout if self.training else 0.0,
            cp_group=None if has_all_keys else segments.cp_group,
            picks_again=segments.shared is not None,
        )
        return out.reshape(out.size(0), -1)


class LatentSelfAttention(MLASelfAttention):
    """Megatron's latent attention (DeepSeek-V2, arXiv 2405.04434) for packed rows.

    Context-parallel ranks exchange the latents, which are narrow, instead of the keys and values of all heads: every
    rank projects the latents of the whole sequence up. With sequence parallelism each tensor rank exchanges a slice.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: PackedSegments | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """``hidden_states`` ``[t, 1, h]``, with sequence parallelism a tensor rank's slice of the rows.

        Returns:
            query ``[t, heads, d]``, key ``[T, heads, d]``, value ``[T, heads, v]``, and the slices of the compressed
            query and latents after their norms. T counts the rows of all context-parallel ranks.
        """
        assert packed_seq_params is not None, "the model is only called with packed sequences"
        segments, config = packed_seq_params, self.config
        table = segments.rotation(self.rotary_pos_emb, hidden_states.dtype)
        compressed = hidden_states.squeeze(1)
        if config.q_lora_rank is not None:
            compressed = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0].squeeze(1))
        both = self.linear_kv_down_proj(hidden_states)[0].squeeze(1)
        latent, rope_key = both.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        latent = self.kv_layernorm(latent)
        rope_key = rotate(rope_key.unsqueeze(1), self._slice(table), is_latent=True).squeeze(1)
        if segments.latent_plan is not None:
            latent, rope_key = gather_rows([latent, rope_key], segments.cp_group)
        if self._num_slices > 1:
            rope_key = gather_from_sequence_parallel_region(rope_key, group=self.tp_group)
        inputs = (compressed, latent, rope_key, table)
        if self.recompute_up_proj:
            self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=config.fp8)
            query, key, value = self.qkv_up_checkpoint.checkpoint(self._up_projections, *inputs)
        else:
            query, key, value = self._up_projections(*inputs)
        return query, key, value, compressed, latent

    @property
    def _num_slices(self) -> int:
        return _slices(self.config)

    def _slice(self, table: torch.Tensor) -> torch.Tensor:
        """The rows of ``table`` ``[2, t, d]`` that this tensor rank has before rows are gathered."""
        return table.chunk(self._num_slices, dim=1)[mpu.get_tensor_model_parallel_rank() if self._num_slices > 1 else 0]

    def _up_projections(
        self, compressed: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        up = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        heads = self.num_attention_heads_per_partition
        plain, turned = (
            up(compressed)[0].unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        )
        query = torch.cat([plain, rotate(turned, table, is_latent=True)], dim=-1)
        key, value = (
            self.linear_kv_up_proj(latent)[0]
            .unflatten(-1, (heads, -1))
            .split([config.qk_head_dim, config.v_head_dim], dim=-1)
        )
        key = torch.cat([key, rope_key.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
        return query, key, value.contiguous()
