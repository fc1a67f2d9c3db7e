"""Attention over packed sequences, without TransformerEngine and without a padding mask of the whole micro-batch.

Queries, keys and values are ``[t, heads, head_dim]`` with positions already in ("thd": all sequences of a micro-batch
concatenated). Causal within a sequence, blind across sequences. The backends' models call
:func:`packed_attention` in every layer with a plan that is made once per micro-batch.

With shared prefixes a sample's first keys are rows of other samples (``slime.batch.packing``).

With context parallelism a rank has the queries of two chunks per segment (``context_parallel``) and gathers the keys
and values of all ranks. Each chunk sees the keys from its segment's start to its own end. All ranks see equally many.

On cuda in 16 bit: torch's variable-length flash attention. Otherwise SDPA: sequences of about the same length share one
padded call, since hundreds of calls for short sequences cost more than the padding. A long one gets a separate call.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from slime.backends.training.context_parallel import gather_rows, picked_rows, zigzag_rows
from slime.batch.packing import copy_to, rows_of_samples
from slime.utils import accelerator
from slime.utils.errors import ConfigError

# sequences share a padded call up to this difference in length (tokens), or up to a quarter of the longest
_SHORT = 32
# limit of flash attention
_WIDEST_HEAD = 256
_PACKAGES = {"fa3": "FlashAttention-3 (module flash_attn_interface)", "fa4": "the package flash-attn-4"}


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    dropout: float = 0.0,
    cp_group: Any = None,
    picks_again: bool = False,
) -> torch.Tensor:
    """query ``[t, heads, d]``, key ``[t, groups, d]`` and value ``[t, groups, v]`` -> ``[t, heads, v]``, v <= d.

    Args:
        cp_group: the ranks that share the sequences, all of which call this. None for one rank.
        picks_again: keep keys and values once for the backward pass, not once per sample that shares a prefix.
    """
    if cp_group is not None:
        key, value = gather_rows([key, value], cp_group)
    width = value.size(-1)
    if width != query.size(-1):
        # latent attention: kernels take one width only. Zero columns only add zero columns to the output
        value = F.pad(value, (0, query.size(-1) - width))
    # only SDPA applies dropout
    is_varlen = dropout == 0.0 and _has_varlen_kernel(query.dtype, query.size(-1))
    rows = (plan.key_rows if is_varlen else plan.padding.key_source) if plan.picks_keys else None
    context = nullcontext([key, value]) if rows is None else picked_rows([key, value], rows, again=picks_again)
    with context as (key, value):
        if is_varlen:
            out = _varlen(query, key, value, plan, scale)
        else:
            out = _padded(query, key, value, plan.padding, scale, dropout)
    return out[..., :width]


@dataclass(frozen=True)
class Piece:
    """Consecutive queries of one segment, and the keys that the last of them sees: those from the segment's start.

    Attributes:
        q_begin, q_length: rows of this rank's ``[t]``.
        k_begin, k_length: rows of the whole ``[T]``. Query i sees the first ``k_length - q_length + i + 1`` of them.
        prefix: spans (first row, rows) of the keys before ``k_begin``, which ``k_length`` counts as well. Empty if the
            segment is a whole sequence.
    """

    q_begin: int
    q_length: int
    k_begin: int
    k_length: int
    prefix: tuple[tuple[int, int], ...] = ()

    @property
    def key_rows(self) -> torch.Tensor:
        """int64 ``[k_length]``, rows of the whole."""
        own = (self.k_begin, self.k_length - sum(length for _, length in self.prefix))
        return torch.cat([torch.arange(begin, begin + length) for begin, length in (*self.prefix, own)])


@dataclass(frozen=True)
class PaddedBatch:
    """Pieces of about the same length, attended to in one padded call.

    Attributes:
        shape: (pieces, padded queries, padded keys).
        visible: bool ``[pieces, 1, queries, keys]``. None if queries and keys are the same tokens, which are causal.
    """

    shape: tuple[int, int, int]
    visible: torch.Tensor | None


@dataclass(frozen=True)
class PaddingPlan:
    """How ``[t, ...]`` becomes padded batches and comes back.

    Attributes:
        batches: the padded calls, in order.
        source: int64 [P], for each padded query the packed row it copies. Padding copies its piece's start.
        target: int64 [t], for each packed row its padded position.
        is_real: bool [P], false on padding.
        key_source: as ``source`` for the keys, rows of the gathered ``[T]``. None if it equals ``source``.
        is_packed: the padded queries are the packed rows, in the same order.
    """

    batches: tuple[PaddedBatch, ...]
    source: torch.Tensor
    target: torch.Tensor
    is_real: torch.Tensor
    key_source: torch.Tensor | None
    is_packed: bool


class AttentionPlan:
    """The keys that each query of a micro-batch sees. The forms that the kernels need are made on demand.

    Attributes:
        pieces: this rank's queries, in order.
        gathered_row: int64 ``[T]``, position of each row of the whole among the gathered keys. None on one rank.
    """

    def __init__(self, pieces: list[Piece], gathered_row: torch.Tensor | None, device: torch.device) -> None:
        self.pieces = pieces
        self.gathered_row = gathered_row
        self._device = device

    @property
    def is_sharded(self) -> bool:
        """Keys come from several ranks."""
        return self.gathered_row is not None

    @functools.cached_property
    def picks_keys(self) -> bool:
        """The keys of the pieces, one after the other, are not the rows of the keys."""
        return self.is_sharded or _has_prefixes(self.pieces)

    def prepare(self) -> None:
        """Make the tensors that the device's kernel needs. Otherwise the first layer makes them."""
        if accelerator.current().is_cpu or not _has_varlen():
            _ = self.padding
            return
        _ = self.lengths
        if self.picks_keys:
            _ = self.key_rows

    def in_slices(self, count: int) -> AttentionPlan:
        """The plan for keys that are gathered in another order.

        Args:
            count: every rank's rows are cut into so many slices. The first slices of all ranks come first.
        """
        assert self.gathered_row is not None, "without context parallelism nothing is gathered"
        rows = sum(piece.q_length for piece in self.pieces)
        width, ranks = rows // count, self.gathered_row.numel() // rows
        rank, row = self.gathered_row // rows, self.gathered_row % rows
        place = (row // width * ranks + rank) * width + row % width
        return AttentionPlan(self.pieces, place, self._device)

    @functools.cached_property
    def padding(self) -> PaddingPlan:
        return _padding_plan(self.pieces, self.gathered_row, self._device)

    @functools.cached_property
    def key_rows(self) -> torch.Tensor:
        """Rows of the gathered keys, piece after piece: int64."""
        # spans overlap: both pieces of a segment see its first keys
        rows = copy_to(torch.cat([piece.key_rows for piece in self.pieces]), self._device)
        return rows if self.gathered_row is None else self.gathered_row[rows]

    @functools.cached_property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Bounds of the pieces' queries and keys, int32 ``[pieces + 1]``, and the longest of each."""
        queries = [piece.q_length for piece in self.pieces]
        keys = [piece.k_length for piece in self.pieces]
        return self._bounds(queries), self._bounds(keys), max(queries), max(keys)

    def _bounds(self, lengths: list[int]) -> torch.Tensor:
        return copy_to(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), self._device)


def plan_attention(
    cu_seqlens: Sequence[int] | torch.Tensor,
    cp_rank: int = 0,
    cp_size: int = 1,
    *,
    device: torch.device | None = None,
    shared: Sequence[int] | None = None,
) -> AttentionPlan:
    """The plan of one micro-batch.

    Args:
        cu_seqlens: ``[S + 1]`` of the whole micro-batch: where each segment starts, and the end of the last. Reading a
            tensor waits for its device.
        device: of the plan's tensors. By default that of ``cu_seqlens``, or the CPU.
        shared: tokens that each sample shares with the one before it, see ``slime.batch.packing``. On one rank only.
    """
    if isinstance(cu_seqlens, torch.Tensor):
        device = device or cu_seqlens.device
        cu_seqlens = cu_seqlens.tolist()
    device = device or torch.device("cpu")
    bounds = list(cu_seqlens)
    pieces = [] if shared is None else _pieces_with_prefixes(bounds, shared)
    for start, end in itertools.pairwise(bounds if shared is None else bounds[len(shared) :]):
        if cp_size == 1:
            pieces.append(Piece(start, end - start, start, end - start))
            continue
        chunk, local = (end - start) // (2 * cp_size), start // cp_size
        # chunks cp_rank and 2 cp_size - 1 - cp_rank of the segment, see context_parallel
        pieces.append(Piece(local, chunk, start, (cp_rank + 1) * chunk))
        pieces.append(Piece(local + chunk, chunk, start, (2 * cp_size - cp_rank) * chunk))
    gathered_row = None
    if cp_size > 1:
        whole = torch.cat([zigzag_rows(torch.tensor(bounds), rank, cp_size) for rank in range(cp_size)])
        gathered_row = torch.empty_like(whole)
        # the inverse permutation: gathered keys come rank after rank
        gathered_row[whole] = torch.arange(whole.numel())
        gathered_row = copy_to(gathered_row, device)
    return AttentionPlan(pieces, gathered_row, device)


def _has_prefixes(pieces: list[Piece]) -> bool:
    return any(piece.k_length != piece.q_length for piece in pieces)


def _pieces_with_prefixes(bounds: Sequence[int], shared: Sequence[int]) -> list[Piece]:
    pieces = []
    for spans, prefix, start, end in zip(
        rows_of_samples(bounds, shared), shared, bounds, bounds[1 : len(shared) + 1], strict=False
    ):
        if end == start:
            continue  # the sample is the beginning of the one before it
        begin, _ = spans[-1]  # the span that ends with the segment may begin with a part of the prefix
        pieces.append(Piece(start, end - start, begin, prefix + end - start, tuple(spans[:-1])))
    return pieces


def _group(pieces: list[Piece], *, by_queries: bool) -> list[list[Piece]]:
    """Pieces with about equally many keys, and with ``by_queries`` about equally many queries too."""

    def fits(first: Piece, piece: Piece) -> bool:
        pairs = [(first.k_length, piece.k_length)]
        if by_queries:
            pairs.append((first.q_length, piece.q_length))
        return all(abs(one - other) <= max(_SHORT, max(one, other) // 4) for one, other in pairs)

    groups: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda one: (-one.k_length, -one.q_length)):
        group = next((group for group in groups if fits(group[0], piece)), None)
        if group is None:
            groups.append([piece])
        else:
            group.append(piece)
    return groups


def _padding_plan(pieces: list[Piece], gathered_row: torch.Tensor | None, device: torch.device) -> PaddingPlan:
    is_sharded, picks_keys = gathered_row is not None, gathered_row is not None or _has_prefixes(pieces)
    sources, reals, keys, batches = [], [], [], []
    for group in _group(pieces, by_queries=not is_sharded):
        q_begin, q_length, k_length = torch.tensor(
            [[one.q_begin, one.q_length, one.k_length] for one in group]
        ).T.unsqueeze(-1)
        queries, longest = torch.arange(int(q_length.max())), torch.arange(int(k_length.max()))
        is_real = queries < q_length
        # padding copies the first row of its piece: any valid row does
        sources.append(torch.where(is_real, q_begin + queries, q_begin).flatten())
        reals.append(is_real.flatten())
        visible = None
        if picks_keys:
            rows = [one.key_rows for one in group]
            keys += [F.pad(row, (0, len(longest) - len(row)), value=int(row[0])) for row in rows]
        if is_sharded or not torch.equal(q_length, k_length):
            # padded queries see real keys as well: a softmax over no key would be nan
            last_seen = (k_length - q_length + queries).clamp(max=k_length - 1)
            visible = (longest <= last_seen.unsqueeze(-1)).unsqueeze(1).to(device)
        batches.append(PaddedBatch((len(group), len(queries), len(longest)), visible))
    source, is_real = torch.cat(sources), torch.cat(reals)
    target = torch.empty(int(is_real.sum()), dtype=torch.int64)
    target[source[is_real]] = torch.arange(len(source))[is_real]
    key_source = torch.cat(keys).to(device) if picks_keys else None
    if key_source is not None and gathered_row is not None:
        key_source = gathered_row[key_source]
    is_packed = torch.equal(source, torch.arange(len(target)))  # sequences of equal length
    return PaddingPlan(tuple(batches), source.to(device), target.to(device), is_real.to(device), key_source, is_packed)


class _Move(torch.autograd.Function):
    """``x[there]``. The gradient of padding is zero, so ``grad[back]`` is enough and no slow scatter-add is needed."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, there: torch.Tensor, back: torch.Tensor, is_real: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.back, ctx.is_real = back, is_real
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        moved = grad.index_select(0, ctx.back)
        if ctx.is_real is not None:
            moved.masked_fill_(~ctx.is_real[:, None, None], 0.0)
        return moved, None, None, None


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q_bounds, k_bounds, longest_q, longest_k = plan.lengths
    # kernels of before the keyword take fewer key heads without it
    takes_gqa = "enable_gqa" in _varlen_keywords()
    gqa: dict[str, Any] = {"enable_gqa": q.size(1) != k.size(1)} if takes_gqa else {}
    out = varlen_attn(
        q,
        k,
        v,
        q_bounds,
        k_bounds,
        longest_q,
        longest_k,
        scale=scale,
        window_size=(-1, 0),  # causal: the last query of a piece sees the last key of it
        **gqa,
    )
    assert isinstance(out, torch.Tensor), "only asked for, it comes with the normaliser"
    return out


def _padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PaddingPlan, scale: float, dropout: float
) -> torch.Tensor:
    queries = _pad(q, plan)
    keys, values = (k, v) if plan.key_source is not None else (_pad(k, plan), _pad(v, plan))
    outputs = []
    q_end = k_end = 0
    for batch in plan.batches:
        pieces, num_queries, num_keys = batch.shape
        q_begin, q_end = q_end, q_end + pieces * num_queries
        k_begin, k_end = k_end, k_end + pieces * num_keys
        out = F.scaled_dot_product_attention(
            queries[q_begin:q_end].view(pieces, num_queries, *q.shape[1:]).transpose(1, 2),
            keys[k_begin:k_end].view(pieces, num_keys, *k.shape[1:]).transpose(1, 2),
            values[k_begin:k_end].view(pieces, num_keys, *v.shape[1:]).transpose(1, 2),
            attn_mask=batch.visible,
            is_causal=batch.visible is None,  # a query never sees the padding after its segment
            dropout_p=dropout,
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if plan.is_packed:
        return padded
    unpadded: torch.Tensor = _Move.apply(padded, plan.target, plan.source, plan.is_real)  # type: ignore[no-untyped-call]
    return unpadded


def _pad(x: torch.Tensor, plan: PaddingPlan) -> torch.Tensor:
    if plan.is_packed:
        return x
    padded: torch.Tensor = _Move.apply(x, plan.source, plan.target, None)  # type: ignore[no-untyped-call]
    return padded


def _has_varlen_kernel(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's flash attention runs here and takes such heads."""
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= _WIDEST_HEAD
    return fits and not accelerator.current().is_cpu and _has_varlen()


def _has_varlen() -> bool:
    return _uses_varlen and {"scale", "window_size"} <= _varlen_keywords()


@functools.cache
def _varlen_keywords() -> frozenset[str]:
    """Parameters of torch's variable-length attention, which grow from version to version. Empty without it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


_uses_varlen = True


def choose_kernel(backend: str) -> None:
    """Apply ``--attention-backend`` in this process.

    Args:
        backend: ``fa3`` and ``fa4`` replace torch's FlashAttention-2, ``unfused`` and ``local`` its variable-length
            kernel by SDPA. Other values leave the default.

    Raises:
        ConfigError: this torch or this machine lacks the kernel.
    """
    global _uses_varlen
    _uses_varlen = backend not in ("unfused", "local")
    if backend not in _PACKAGES:
        return
    flag, fix = f"--attention-backend {backend}", "or leave the flag out, for torch's FlashAttention-2."
    if accelerator.current().is_cpu:
        raise ConfigError(f"{flag}: the kernel needs CUDA and this machine trains on a CPU. Leave the flag out.")
    try:
        from torch.nn.attention import activate_flash_attention_impl
    except ImportError:
        raise ConfigError(
            f"{flag}: torch {torch.__version__} cannot exchange its kernel. Install a torch with "
            f"torch.nn.attention.activate_flash_attention_impl, {fix}"
        ) from None
    try:
        activate_flash_attention_impl(backend.upper())
    except (ImportError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{flag}: {error}. Install {_PACKAGES[backend]}, {fix}") from error
