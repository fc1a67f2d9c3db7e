"""The gated delta rule over packed sequences, in plain torch: the reference, and what runs where no kernel is there.

Gated Delta Networks (arXiv 2412.06464), equation 10. A head keeps a state S of dk x dv numbers per sequence, zero at
its start. With keys of length one, decay a_t = exp(g_t), g_t <= 0, and writing strength b_t in (0, 1):

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        decay, then replace what is stored under k_t
    o_t = S_t^T q_t / sqrt(dk)

Called by ``gated_delta_net``; gradients are autograd's. Knows neither Megatron nor process groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["DeltaRule", "causal_conv", "gated_delta_rule", "unit_length"]

DeltaRule = Callable[..., torch.Tensor]
"""``(query, key, value, log_decay, beta, cu_seqlens)`` as :func:`gated_delta_rule` takes them -> ``[t, heads, dv]``."""

_CHUNK = 64


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Rows of the last dimension scaled to length one, fp32; the epsilon is that of the model's reference kernels."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def causal_conv(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Every channel convolved with its own ``K`` weights over the last K tokens of the same sequence.

    Args:
        x: ``[t, channels]``, sequences behind one another.
        weight: ``[channels, 1, K]``; ``weight[:, :, -1]`` meets the token itself.
        cu_seqlens: ``[S + 1]`` where each sequence starts, and t.

    Returns:
        ``[t, channels]``.
    """
    # K - 1 zeros in front of every sequence keep its neighbours apart
    gap = weight.size(-1) - 1
    lengths = cu_seqlens.diff().long()
    sequence = torch.arange(lengths.numel(), device=x.device).repeat_interleave(lengths)
    rows = torch.arange(x.size(0), device=x.device) + gap * (sequence + 1)
    spaced = x.new_zeros(x.size(0) + gap * lengths.numel(), x.size(1)).index_copy(0, rows, x)
    out = F.conv1d(spaced.t()[None], weight, groups=x.size(1))[0].t()
    return out.index_select(0, rows - gap)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    chunk_size: int = _CHUNK,
) -> torch.Tensor:
    """The outputs o_t of all tokens, computed a chunk of tokens at a time.

    Args:
        query, key: ``[t, heads, dk]``, rows of length one.
        value: ``[t, heads, dv]``.
        log_decay: ``[t, heads]`` g_t.
        beta: ``[t, heads]`` b_t.
        cu_seqlens: ``[S + 1]`` where each sequence starts, and t. The state is zero at every start.
        chunk_size: tokens that are taken together; it changes the rounding, nothing else.

    Returns:
        ``[t, heads, dv]`` in the dtype of ``value``; all arithmetic is fp32.
    """
    slots, counts = _chunk_layout(cu_seqlens, chunk_size)

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """``[t, heads, d]`` -> ``[chunks, heads, chunk_size, d]``; missing tokens are zero and change no state."""
        padded = x.new_zeros(sum(counts) * chunk_size, *x.shape[1:], dtype=torch.float32).index_copy(
            0, slots, x.float()
        )
        return padded.view(-1, chunk_size, *x.shape[1:]).transpose(1, 2)

    queries, keys, values = chunks(query * query.size(-1) ** -0.5), chunks(key), chunks(value)
    strength = chunks(beta.unsqueeze(-1))
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=value.device).triu(1)
    # [chunks, heads, chunk_size, 1]: log of a_1 ... a_i. No cumsum: on a GPU it has no deterministic kernel
    decay = (~later).float() @ chunks(log_decay.unsqueeze(-1))

    # Inside a chunk (arXiv 2406.06484, section 3.2): what token i writes is b_i (v_i - what is stored under k_i), which
    # depends on what the tokens j < i wrote. With A_ij = b_i (k_i . k_j) a_{j+1} ... a_i below the diagonal:
    #     (I + A) writes = diag(b) V - diag(b) diag(a_1 ... a_i) K S      S: the state before the chunk
    between = (decay - decay.mT).masked_fill(later, -torch.inf).exp()
    overlap = (strength * keys) @ keys.mT * between
    right = torch.cat([strength * values, strength * decay.exp() * keys], dim=-1)
    own, of_state = torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True).split(
        [value.size(-1), key.size(-1)], dim=-1
    )
    within = queries @ keys.mT * between
    queries = queries * decay.exp()
    end = decay[:, :, -1:]
    keys = keys * (end - decay).exp()

    state = value.new_zeros(counts[0] if counts else 0, *keys.shape[1:2], key.size(-1), value.size(-1)).float()
    outputs = []
    # The first chunks of all sequences, then the second ones ...; a sequence that has ended is always the last of them
    for begin, count in zip(_starts(counts), counts, strict=True):
        part = slice(begin, begin + count)
        state = state[:count]
        writes = own[part] - of_state[part] @ state
        outputs.append(queries[part] @ state + within[part] @ writes)
        state = end[part].exp() * state + keys[part].mT @ writes
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1) if outputs else value.float()
    return out.index_select(0, slots).to(value.dtype)


def _chunk_layout(cu_seqlens: torch.Tensor, size: int) -> tuple[torch.Tensor, list[int]]:
    """Where every token goes, int64 ``[t]``, when sequences are cut into chunks of ``size`` rows and the chunks sorted
    by their number within the sequence, longest sequences first; and how many chunks there are of each number."""
    lengths = cu_seqlens.diff().long()
    chunks = (lengths + size - 1) // size
    order = chunks.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    numbers = torch.arange(int(chunks.max()) if chunks.numel() else 0, device=order.device)
    counts = (chunks[:, None] > numbers).sum(0)
    starts = counts.cumsum(0) - counts
    sequence = torch.arange(lengths.numel(), device=order.device).repeat_interleave(lengths)
    position = torch.arange(sequence.numel(), device=order.device) - cu_seqlens[:-1].long()[sequence]
    slots = (starts[position // size] + rank[sequence]) * size + position % size
    return slots, counts.tolist()


def _starts(counts: list[int]) -> list[int]:
    return [sum(counts[:index]) for index in range(len(counts))]
