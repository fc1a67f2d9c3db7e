"""Log-probability and entropy of given tokens from vocabulary-parallel logits, in fp32, with little memory.

Called by every forward pass of a trainer with the rows that predict response tokens. Beyond the logits and their
gradient it needs the memory of one fp32 buffer ``[chunk, V/tp]``, or of two if all rows are one chunk. Every call makes
two all-reduces, with any chunk size.

On CUDA ``torch.compile`` makes one kernel of each pass over the logits and needs no buffer: the logits are read three
times, and their gradient is written once. A cut vocabulary takes the buffers there, too.

If top-p or top-k cut the vocabulary, the engine sampled from ``softmax(z)`` cut to a set S and scaled up to 1. The
policy that trains is the same cut,

    pi_S(v) = exp(z_v) / sum_{u in S} exp(z_u)    for v in S,

with the engine's S for old and new weights. S is recorded and not computed again, because a set from the trainer's
logits may lack the token that was sampled.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from slime.algorithms.arguments import CUDA_CHUNK_ROWS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingMask:
    """The sets of ``N`` rows, concatenated.

    Attributes:
        ids: ``[K]`` int64, global ids, on the device of the logits.
        rows: ``[K]`` int64, the row that each id belongs to, on that device.
        is_cut: ``[N]`` bool, on that device. A row without ids was not sampled: it keeps the whole vocabulary.
        borders: start of the ids of row i in ``ids``, ``N + 1`` entries. On the host, so that cutting out some
            rows does not wait for the device.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    is_cut: torch.Tensor
    borders: Sequence[int]

    @classmethod
    def of(
        cls,
        ids: Sequence[torch.Tensor],
        offsets: Sequence[torch.Tensor],
        *,
        select: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> SamplingMask:
        """From per-sample arrays as engines return them.

        Args:
            ids: per sample the sets of its response tokens, flattened.
            offsets: per sample ``[R_i + 1]``, where each set starts. First 0, last ``len(ids)``.
            select: ``[N]`` positions among all response tokens, one per row of the result. None means all of them.
            device: of the result. None means that of ``ids``.

        Raises:
            ValueError: offsets that do not fit the ids.
        """
        for sample, (some, borders) in enumerate(zip(ids, offsets, strict=True)):
            if not len(borders) or int(borders[0]) != 0 or int(borders[-1]) != len(some):
                raise ValueError(
                    f"sample {sample}: sampling mask with {len(some)} ids, offsets {borders.tolist()[-1:]}"
                )
        # on the host: the sizes of the result are needed there, and each would be a wait for the device
        counts = torch.cat([borders.long().diff() for borders in offsets]).cpu()
        flat = torch.cat([some.long() for some in ids])
        if select is not None:
            starts = counts.cumsum(0) - counts
            chosen = select.cpu()
            starts, counts = starts[chosen], counts[chosen]
            within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
            flat = flat[(starts.repeat_interleave(counts) + within).to(flat.device)]
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        device = flat.device if device is None else device
        ends = counts.cumsum(0).tolist()
        return cls(flat.to(device), rows.to(device), (counts > 0).to(device), [0, *ends])

    def __len__(self) -> int:
        return len(self.borders) - 1

    def dropped(self, rows: slice, first_id: int, num_ids: int) -> torch.Tensor:
        """``[n, num_ids]`` bool: True at ids ``first_id ...`` that the rows were not sampled from."""
        some = slice(self.borders[rows.start], self.borders[rows.stop])
        column = self.ids[some] - first_id
        is_here = (column >= 0) & (column < num_ids)
        # ids of other tensor ranks go to a column that is cut off: a selection would wait for the device
        out = self.is_cut[rows].unsqueeze(1).repeat(1, num_ids + 1)
        out[self.rows[some] - rows.start, torch.where(is_here, column, num_ids)] = False
        return out[:, :num_ids]


Keep: TypeAlias = torch.Tensor | SamplingMask


def log_probs_and_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = -1,
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
    keep: Keep | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``log softmax(logits / temperature)[target]`` per row and, on request, the entropy of that distribution.

    With ``x = logits / temperature``, ``S = sum_v exp(x_v - max x)`` and ``p = softmax(x)``:

        log_prob = x_target - max x - log S            d/dx_v =  1[v = target] - p_v
        entropy  = -sum_v p_v log p_v                  d/dx_v = -p_v (log p_v + entropy)

    Rank k of ``group`` holds the ids ``[k V/tp, (k+1) V/tp)``. Columns with ids from ``vocab_size`` on are padding of
    the embedding table: they take no part in the softmax, as in the engine, and get a zero gradient.

    Args:
        logits: ``[N, V/tp]``, any float type.
        targets: ``[N]`` int64, global ids. An id outside the vocabulary gives nan.
        group: tensor-parallel group. None means that this rank holds the whole vocabulary (no collectives).
        vocab_size: ids in the vocabulary. None means no padding.
        temperature: sampling temperature of the rollout.
        chunk_size: rows handled at a time, fewer if they need several buffers. -1 means all, None 1024 on CUDA and all
            on a CPU. Values do not depend on it.
        with_entropy: compute the entropy as well.
        with_entropy_grad: give the entropy a graph.
        keep: the ids that sampling could choose from (top-p, top-k), as sets or as ``[N, V/tp]`` bool. The log-prob is
            that of the renormalized set. A row's target belongs to it in any case. The entropy stays that of the whole
            vocabulary.

    Returns:
        (log_probs ``[N]`` fp32, entropy ``[N]`` fp32 or None).

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"expected logits [N, V] and targets [N], got {tuple(logits.shape)}, {tuple(targets.shape)}")
    if temperature <= 0:
        raise ValueError(f"--rollout-temperature {temperature} must be above 0.")
    if isinstance(keep, torch.Tensor) and keep.shape != logits.shape:
        raise ValueError(f"keep must have the shape of the logits {tuple(logits.shape)}, got {tuple(keep.shape)}")
    if isinstance(keep, SamplingMask) and len(keep) != len(logits):
        raise ValueError(f"keep has sets for {len(keep)} rows, the logits have {len(logits)}")
    if chunk_size is None:
        chunk_size = CUDA_CHUNK_ROWS if logits.is_cuda else -1
    shard = _shard(logits, group, vocab_size)
    plan = _Plan(shard, group, 1.0 / temperature, chunk_size, with_entropy, with_entropy and with_entropy_grad)
    run = _LogProbs.apply
    if keep is None:
        log_probs, entropy = run(logits, targets, plan, None)  # type: ignore[no-untyped-call]  # torch has no types
    else:  # two distributions: the kept ids, and all of them for the entropy
        only = replace(plan, with_entropy=False, with_entropy_grad=False)
        log_probs, _ = run(logits, targets, only, keep)  # type: ignore[no-untyped-call]
        entropy = run(logits, targets, plan, None)[1] if with_entropy else None  # type: ignore[no-untyped-call]
    return log_probs, entropy if with_entropy else None


@dataclass(frozen=True)
class _Shard:
    """The part of the vocabulary on this rank: ``num_ids`` real ids from ``first_id`` on, then padding."""

    first_id: int
    num_ids: int
    vocab_size: int


@dataclass(frozen=True)
class _Plan:
    shard: _Shard
    group: dist.ProcessGroup | None
    scale: float
    chunk_size: int
    with_entropy: bool
    with_entropy_grad: bool

    def chunks(self, num_rows: int, width: float) -> Iterator[slice]:
        """Row ranges to handle at a time. A rank that holds padding only has none.

        Args:
            width: scratch per logit, in fp32 numbers. All of a chunk's scratch fits into one ``[chunk_size, num_ids]``.
        """
        step = self._rows(num_rows, width)
        starts = range(0, num_rows, step) if self.shard.num_ids else ()
        return (slice(start, min(start + step, num_rows)) for start in starts)

    def buffers(self, logits: torch.Tensor, count: int, width: float) -> list[torch.Tensor]:
        """Scratch of one chunk each, used again for every chunk."""
        shape = (min(self._rows(logits.shape[0], width), logits.shape[0]), self.shard.num_ids)
        return [torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(count)]

    def _rows(self, num_rows: int, width: float) -> int:
        return max(int(self.chunk_size / max(width, 1.0)), 1) if self.chunk_size > 0 else max(num_rows, 1)


def _shard(logits: torch.Tensor, group: dist.ProcessGroup | None, vocab_size: int | None) -> _Shard:
    width = logits.shape[1]
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    total = width * size if vocab_size is None else vocab_size
    if not 0 < total <= width * size:
        raise ValueError(f"vocab_size {vocab_size} must be in 1..{width * size}, the columns of all tensor ranks")
    # the last ranks may hold padding only
    return _Shard(rank * width, max(0, min(width, total - rank * width)), total)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, plan: _Plan, keep: Keep | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = logits.shape[0]
        # the maximum of all tensor ranks: each must subtract the same number before sums are added up
        top = _row_max(logits, targets, plan, keep)
        # rows: sum of exp, target's logit, sum of exp * logit (only for the entropy), so that one all-reduce is enough
        sums = torch.zeros(3 if plan.with_entropy else 2, num_rows, dtype=torch.float32, device=logits.device)
        local = logits[:, : plan.shard.num_ids]
        is_compiled = _runs_compiled(local, keep)
        if is_compiled:
            index, is_mine = _local_index(targets, plan.shard)
            of_targets = local.gather(1, index).squeeze(1).float() * plan.scale - top
            sums[1] = torch.where(is_mine, of_targets, 0.0)
            sums[0], weighted = _compiled(_sums_of_exp)(local, top, plan.scale)
            if plan.with_entropy:
                sums[2] = weighted
        width = _scratch(1 + plan.with_entropy, keep)
        buffers = [] if is_compiled else plan.buffers(logits, 1 + plan.with_entropy, width)
        for rows in () if is_compiled else plan.chunks(num_rows, width):
            z = _shifted(local[rows], plan.scale, top[rows], out=_head(buffers[0], rows))
            index, is_mine = _local_index(targets[rows], plan.shard)
            if keep is not None:
                z.masked_fill_(_dropped(keep, rows, index, is_mine, plan.shard), -torch.inf)
            sums[1, rows] = torch.where(is_mine, z.gather(1, index).squeeze(1), 0.0)
            if plan.with_entropy:
                exp = torch.exp(z, out=_head(buffers[1], rows))
                sums[0, rows] = exp.sum(1)
                sums[2, rows] = exp.mul_(z).sum(1)
            else:
                sums[0, rows] = z.exp_().sum(1)
        # tensor ranks have the same rows, so all of them skip the collective or none
        if plan.group is not None and num_rows:
            dist.all_reduce(sums, group=plan.group)

        log_sum = sums[0].log()
        # nan instead of an error: a check on the host would wait for the device
        in_vocab = (targets >= 0) & (targets < plan.shard.vocab_size)
        log_probs = torch.where(in_vocab, sums[1] - log_sum, torch.nan)
        entropy = log_sum - sums[2] / sums[0] if plan.with_entropy else log_sum.new_empty(0)
        if not plan.with_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.plan, ctx.keep = plan, keep
        # backward computes the softmax again: its [N, V/tp] in fp32 would be the largest tensor of the step
        ctx.save_for_backward(logits, targets, top + log_sum, entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, targets, log_norm, entropy = ctx.saved_tensors
        plan: _Plan = ctx.plan
        grad_log_probs, grad_entropy = (g.float() for g in grads)
        out = torch.empty_like(logits)
        # columns of padding: empty_like has arbitrary content, and the chunks do not write there
        out[:, plan.shard.num_ids :] = 0
        local = logits[:, : plan.shard.num_ids]
        if _runs_compiled(local, ctx.keep):
            index, is_mine = _local_index(targets, plan.shard)
            column = torch.where(is_mine, index.squeeze(1), -1)
            of_entropy = (grad_entropy, entropy) if plan.with_entropy_grad else None
            write = _compiled(_write_gradient)
            write(out[:, : plan.shard.num_ids], local, log_norm, column, grad_log_probs, of_entropy, plan.scale)
            return out, None, None, None
        # an fp32 output is its own scratch buffer
        writes_in_place = out.dtype == torch.float32
        count = (not writes_in_place) + plan.with_entropy_grad
        width = _scratch(count, ctx.keep)
        buffers = plan.buffers(logits, count, width)
        for rows in plan.chunks(logits.shape[0], width):
            target_grad = grad_log_probs[rows].unsqueeze(1)
            local_out = out[rows, : plan.shard.num_ids]
            work = local_out if writes_in_place else _head(buffers[0], rows)
            log_p = _shifted(local[rows], plan.scale, log_norm[rows], out=work)
            index, is_mine = _local_index(targets[rows], plan.shard)
            if ctx.keep is not None:
                log_p.masked_fill_(_dropped(ctx.keep, rows, index, is_mine, plan.shard), -torch.inf)
            if plan.with_entropy_grad:
                factor = torch.add(log_p, entropy[rows].unsqueeze(1), out=_head(buffers[-1], rows))
                factor.mul_(grad_entropy[rows].unsqueeze(1)).add_(target_grad).neg_()
                grad = log_p.exp_().mul_(factor)
            else:
                grad = log_p.exp_().mul_(-target_grad)
            # a target of another rank has a clamped index here, and must add 0 to it
            grad.scatter_add_(1, index, torch.where(is_mine.unsqueeze(1), target_grad, 0.0))
            grad.mul_(plan.scale)
            if not writes_in_place:
                local_out.copy_(grad)
        return out, None, None, None


@functools.cache
def can_compile() -> bool:
    """Whether ``torch.compile`` makes kernels for a GPU here. Triton needs a C compiler when it starts them."""
    compilers = [os.environ.get("CC") or "cc", "gcc", "clang"]
    missing = [] if importlib.util.find_spec("triton") else ["the package triton"]
    missing += [] if any(map(shutil.which, compilers)) else ["a C compiler (apt-get install gcc, or set CC)"]
    if missing:
        logger.warning(
            "log-probs, SwiGLU and dropout run as single operators, which costs a tenth of a step: torch.compile lacks "
            "%s.",
            " and ".join(missing),
        )
    return not missing


def _runs_compiled(logits: torch.Tensor, keep: Keep | None) -> bool:
    return logits.is_cuda and logits.numel() > 0 and keep is None and can_compile()


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _sums_of_exp(logits: torch.Tensor, top: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row with ``z = logits * scale - top``: the sums of exp(z) and of exp(z) z, fp32."""
    z = logits.float() * scale - top.unsqueeze(1)
    exp = z.exp()
    return exp.sum(1), (exp * z).sum(1)


def _write_gradient(
    out: torch.Tensor,
    logits: torch.Tensor,
    log_norm: torch.Tensor,
    column: torch.Tensor,
    to_log_probs: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float,
) -> None:
    """Fill ``out`` with the gradient of the logits.

    Args:
        log_norm: ``[N]``, log of the sum of all ranks' exp.
        column: ``[N]``, that of the target. -1: another rank has it.
        of_entropy: the gradient of the entropy, and the entropy. None: it gets none.
    """
    log_p = logits.float() * scale - log_norm.unsqueeze(1)
    target_grad = factor = to_log_probs.unsqueeze(1)
    if of_entropy is not None:
        to_entropy, entropy = of_entropy
        factor = factor + to_entropy.unsqueeze(1) * (log_p + entropy.unsqueeze(1))
    ids = torch.arange(logits.shape[1], device=logits.device)
    of_targets = torch.where(ids == column.unsqueeze(1), target_grad, 0.0)
    out.copy_((of_targets - log_p.exp() * factor) * scale)


def _row_max(logits: torch.Tensor, targets: torch.Tensor, plan: _Plan, keep: Keep | None) -> torch.Tensor:
    """Largest scaled logit of every row over all ranks (among the kept ids), ``[N]`` fp32."""
    num_ids = plan.shard.num_ids
    top = torch.full(logits.shape[:1], -torch.inf, dtype=torch.float32, device=logits.device)
    if num_ids and logits.shape[0] and keep is None:
        # before the conversion: a maximum is exact in 16 bits, and needs no fp32 copy of the logits
        top = logits[:, :num_ids].amax(1).float() * plan.scale
    elif keep is not None:
        for rows in plan.chunks(logits.shape[0], _scratch(1, keep)):
            index, is_mine = _local_index(targets[rows], plan.shard)
            dropped = _dropped(keep, rows, index, is_mine, plan.shard)
            top[rows] = logits[rows, :num_ids].masked_fill(dropped, -torch.inf).amax(1).float() * plan.scale
    if plan.group is not None and logits.shape[0]:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=plan.group)
    return top


def _scratch(buffers: int, keep: Keep | None) -> float:
    """fp32 numbers of scratch per logit. A mask of kept ids takes a byte, and another while it is made."""
    return buffers + (0.0 if keep is None else 0.5)


def _dropped(keep: Keep, rows: slice, index: torch.Tensor, is_mine: torch.Tensor, shard: _Shard) -> torch.Tensor:
    """``[n, num_ids]`` True at ids outside the kept set. A target is inside in any case."""
    if isinstance(keep, SamplingMask):
        dropped = keep.dropped(rows, shard.first_id, shard.num_ids)
    else:
        dropped = ~keep[rows, : shard.num_ids]
    # a clamped index of another rank's target must not keep a column: is_mine is false there
    return dropped.scatter_(1, index, dropped.gather(1, index) & ~is_mine.unsqueeze(1))


def _head(buffer: torch.Tensor, rows: slice) -> torch.Tensor:
    """As much of a buffer as these rows need. The last chunk may be shorter."""
    return buffer[: rows.stop - rows.start]


def _shifted(logits: torch.Tensor, scale: float, shift: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """``logits * scale - shift`` per row, written to the fp32 tensor ``out``."""
    out.copy_(logits)
    if scale != 1.0:
        out.mul_(scale)
    return out.sub_(shift.unsqueeze(1))


def _local_index(targets: torch.Tensor, shard: _Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """(column ``[n, 1]`` of each target, clamped into the shard; whether the shard holds it ``[n]``)."""
    index = targets - shard.first_id
    is_mine = (index >= 0) & (index < shard.num_ids)
    return index.clamp(0, shard.num_ids - 1).unsqueeze(1), is_mine
