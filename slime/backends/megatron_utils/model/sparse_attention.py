"""Sparse attention of DeepSeek-V3.2 and GLM-5: latent attention in which a query sees only the keys an indexer chose.

The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556, equation 1) scores the keys s of a query t with its own heads:

    I[t, s] = sum over heads h of  w[t, h] * relu(q[t, h] . k[s])

and the query attends to the ``topk`` keys with the highest scores among those it sees causally in its sequence. The
choice has no gradient: nothing here teaches the indexer, so its parameters are frozen and stay as they were loaded.

    SparseSelfAttention  projections, and the choice of this layer: ``PackedSegments.chosen_keys[layer number]``
    SparseAttention      the core. A layer without an indexer takes the choice of the last one before it

A choice is int32 ``[t, topk]``, keys counted from the start of the sequence, or None if no sequence is longer than
``topk``: then all keys are visible. Tensor-parallel ranks share the work of choosing and agree on
it. With context parallelism every rank gathers the keys, as for full attention (``training.attention``).

Plugged into the layer spec by ``layer_specs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec

from slime.backends.megatron_utils.checkpoint.tensors import chunks_of
from slime.backends.megatron_utils.model.attention import LatentSelfAttention, PackedAttention, PackedSegments, rotate
from slime.backends.megatron_utils.precision import fake_fp8
from slime.backends.training.attention import AttentionPlan, Piece
from slime.models.shape import SparseShape
from slime.utils import accelerator
from slime.utils.errors import ConfigError

# Queries at a time: scores of a block are fp32 ``[block, index heads, keys]``, its mask bool ``[block, keys]``.
_BLOCK = 128

_KEY_NORM_EPSILON = 1e-6


def make_sparse(block: Any, sparse: SparseShape, first_layer: int) -> None:
    """Put sparse attention into the layers of ``block``, which is the spec of the layers from ``first_layer`` on.

    Raises:
        ConfigError: the first of them would take the choice of a layer on another pipeline stage.
    """
    if not sparse.layers[first_layer]:
        raise ConfigError(
            f"layer {first_layer} (counted from 0) begins a pipeline stage, or a chunk of one, but shares the indexer "
            "of a layer before it: choose other stages."
        )
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        attention.module = SparseSelfAttention
        attention.params = {**attention.params, "sparse": sparse}
        attention.submodules.core_attention = ModuleSpec(SparseAttention, params={"sparse": sparse})


class SparseSelfAttention(LatentSelfAttention):
    """Megatron's latent attention with an indexer, in the layers that have one."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, *, sparse: SparseShape, **kwargs: Any) -> None:
        super().__init__(config, submodules, layer_number, **kwargs)
        self.indexer = Indexer(config, sparse) if sparse.layers[self.layer_number - 1] else None

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: PackedSegments | None = None,
        **kwargs: Any,
    ) -> Any:
        """Megatron's, after which the choice of this layer is in ``packed_seq_params``."""
        assert packed_seq_params is not None, "the model is only called with packed sequences"
        projected = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **kwargs
        )
        if self.indexer is not None:
            compressed_query = projected[3]
            packed_seq_params.chosen_keys[self.layer_number] = self.indexer(
                hidden_states.squeeze(1), compressed_query, packed_seq_params, self.rotary_pos_emb, self.tp_group
            )
        return projected


class Indexer(torch.nn.Module):
    """The parameters of the lightning indexer: whole on every tensor-parallel rank, frozen."""

    def __init__(self, config: Any, sparse: SparseShape) -> None:
        super().__init__()
        self._sparse = sparse
        self._is_sequence_parallel: bool = config.sequence_parallel
        device = None if config.use_cpu_initialization else accelerator.current().device()
        like: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        width = sparse.num_heads * sparse.head_dim
        self.wq_b = torch.nn.Linear(config.q_lora_rank, width, bias=False, **like)
        self.wk = torch.nn.Linear(config.hidden_size, sparse.head_dim, bias=False, **like)
        self.k_norm = torch.nn.LayerNorm(sparse.head_dim, eps=_KEY_NORM_EPSILON, **like)
        self.weights_proj = torch.nn.Linear(config.hidden_size, sparse.num_heads, bias=False, **like)
        self.requires_grad_(False)  # the choice of keys has no gradient

    @torch.no_grad()
    def forward(
        self,
        hidden: torch.Tensor,
        compressed_query: torch.Tensor,
        segments: PackedSegments,
        rotary: Any,
        tp_group: Any,
    ) -> torch.Tensor | None:
        """The choice for the queries of this rank.

        Args:
            hidden, compressed_query: ``[t, hidden size]`` and ``[t, q_lora_rank]``. With sequence parallelism a tensor
                rank's part of the rows.
            rotary: Megatron's rope of this layer.
        """
        if segments.max_seqlen_q <= self._sparse.topk:
            return None
        query, key = self.wq_b(compressed_query), self.k_norm(self.wk(hidden))
        weight = F.linear(hidden.float(), self.weights_proj.weight.float())  # fp32 in the reference and in engines too
        if self._is_sequence_parallel:
            query, key, weight = (
                gather_from_sequence_parallel_region(rows, group=tp_group) for rows in (query, key, weight)
            )
        plan = segments.plan
        # Queries and keys come out in the same order of columns, whichever it is: only their products are used.
        table, is_latent = segments.rotation(rotary, query.dtype), self._sparse.is_rope_interleaved
        query = rotate(query.unflatten(-1, (self._sparse.num_heads, -1)), table, is_latent=is_latent)
        key = rotate(key.unsqueeze(1), table, is_latent=is_latent).squeeze(1)
        if segments.cp_size > 1:
            key = _gather(key, plan, segments.cp_group)
        return choose_keys(query, key, weight, plan.pieces, self._sparse.topk, tp_group)


def _gather(key: torch.Tensor, plan: AttentionPlan, group: Any) -> torch.Tensor:
    """Every context-parallel rank's ``[t, d]``, in the order of the whole: ``[T, d]``."""
    whole = key.new_empty((group.size() * key.size(0), key.size(1)))
    dist.all_gather_into_tensor(whole, key.contiguous(), group=group)
    assert plan.gathered_row is not None, "made for this group"
    return whole[plan.gathered_row]


def _blocks(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        for begin in range(0, piece.q_length, _BLOCK):
            length = min(_BLOCK, piece.q_length - begin)
            seen = piece.k_length - piece.q_length + begin + length
            yield Piece(piece.q_begin + begin, length, piece.k_begin, seen)


def choose_keys(
    query: torch.Tensor, key: torch.Tensor, weight: torch.Tensor, pieces: Sequence[Piece], topk: int, group: Any = None
) -> torch.Tensor:
    """The keys with the highest scores, int32 ``[t, topk]``. See the module docstring.

    Positive factors of the reference (roots of the number and the width of heads) do not change the order.

    Args:
        query, key, weight: ``[t, heads, d]``, ``[T, d]``, fp32 ``[t, heads]``.
        group: ranks that have the same arguments and share the work, or None.

    Returns:
        Rows of blocks that see at most ``topk`` keys are zero and unused. A row that sees fewer than ``topk`` keys
        may have keys after its query.
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    chosen = torch.zeros((query.size(0), topk), dtype=torch.int32, device=query.device)
    for number, block in enumerate(_blocks(pieces)):
        # A block that sees few keys sees all of them. The other blocks are shared among the ranks in turn.
        if block.k_length <= topk or number % size != rank:
            continue
        rows = slice(block.q_begin, block.q_begin + block.q_length)
        keys = key[block.k_begin : block.k_begin + block.k_length]
        products = torch.einsum("qhd,kd->qhk", query[rows].float(), keys.float()).relu_()
        scores = torch.einsum("qh,qhk->qk", weight[rows], products)
        scores.masked_fill_(~_seen(block, key.device), float("-inf"))
        chosen[rows] = scores.topk(topk, dim=-1, sorted=False).indices.int()
    if size > 1:
        dist.all_reduce(chosen, group=group)  # the others' rows are zero
    return chosen


def _seen(block: Piece, device: torch.device) -> torch.Tensor:
    """Causal, bool ``[queries, keys]``."""
    positions = torch.arange(block.k_length - block.q_length, block.k_length, device=device)
    return torch.arange(block.k_length, device=device) <= positions.unsqueeze(-1)


class SparseAttention(PackedAttention):
    """Core attention over the keys that the indexer of this layer, or of one before it, has chosen."""

    def __init__(self, config: Any, layer_number: int, *args: Any, sparse: SparseShape, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        # The last layer up to this one that has an indexer.
        self._chooser = max(number for number in range(1, layer_number + 1) if sparse.layers[number - 1])

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *,
        packed_seq_params: PackedSegments,
        **kwargs: Any,
    ) -> torch.Tensor:
        """query and key ``[t, heads, d]``, value ``[t, heads, d_v]`` -> ``[t, heads * d_v]``."""
        segments = packed_seq_params
        chosen = segments.chosen_keys[self._chooser]
        if chosen is None:
            return super().forward(query, key, value, attention_mask, packed_seq_params=segments, **kwargs)
        plan = segments.latent_plan or segments.plan
        if plan.gathered_row is not None:
            key, value = key[plan.gathered_row], value[plan.gathered_row]
        dropout = self._dropout if self.training else 0.0
        out = attend_to_chosen(query, key, value, plan.pieces, chosen, scale=self._scale, dropout=dropout)
        return out.flatten(1)


def attend_to_chosen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Sequence[Piece],
    chosen: torch.Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """query ``[t, heads, d]``, key ``[T, heads, d]``, value ``[T, heads, v]`` -> ``[t, heads, v]``.

    Args:
        chosen: as :func:`choose_keys` returns it.
    """
    outputs = []
    for block in _blocks(pieces):
        rows = slice(block.q_begin, block.q_begin + block.q_length)
        keys = slice(block.k_begin, block.k_begin + block.k_length)
        visible = _seen(block, query.device)
        if block.k_length > chosen.size(1):
            # The causal mask stays: a choice may contain keys after its query.
            visible &= torch.zeros_like(visible).scatter_(1, chosen[rows].long(), True)
        out = F.scaled_dot_product_attention(
            query[rows].transpose(0, 1).unsqueeze(0),
            key[keys].transpose(0, 1).unsqueeze(0),
            value[keys].transpose(0, 1).unsqueeze(0),
            attn_mask=visible,  # keys are masked, not left out: the cost is that of full attention
            dropout_p=dropout,
            scale=scale,
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def fake_quantize_latents(chunks: Any, block_size: int) -> int:
    """Round the latents of every layer of sparse attention. Returns the number of such layers on this rank."""

    def round_output(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return fake_fp8(output, block_size)

    modules = [module for chunk in chunks_of(chunks) for module in chunk.modules()]
    layers = [module for module in modules if isinstance(module, SparseSelfAttention)]
    for layer in layers:
        layer.kv_layernorm.register_forward_hook(round_output)  # its output is the cached latent
    return len(layers)
