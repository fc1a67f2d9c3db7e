"""The engine's choices of experts: one row per token that went through the model, for its MoE and its dense layers.

    tokens   p p r r r          L
    rows     0 1 2 3            L - 1: the last token was sampled, but never went in
    entry    [row, layer, k]    number of the k-th expert; dense layers hold anything

Called where samples become columns, and by the trainer. Knows no model but the numbers it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch


def compact_routed_experts(
    values: Sequence[Any], total_lengths: Sequence[int], needed_rows: Sequence[int], names: Sequence[str]
) -> list[Any]:
    """The smallest integer tensors that hold the choices, ``[L - 1, layers, topk]``.

    Rows that are missing at the end, behind all that is trained, get any valid choices: a tool's output that no
    request followed has none, and neither has a sample that nothing is trained of.

    Args:
        values: per sample ``[rows, layers, topk]``, a tensor, array or nested list; None for no rows.
        total_lengths: L of every sample.
        needed_rows: how many of its first rows trained tokens depend on.
        names: how errors call the samples.

    Raises:
        ValueError: a sample whose shape is not that of its tokens, or a negative number.
    """
    known = [None if value is None else torch.as_tensor(value) for value in values]
    first = next(value for value in known if value is not None)
    largest = 0
    for name, length, needed, value in zip(names, total_lengths, needed_rows, known, strict=True):
        if value is None:
            continue
        if value.dim() != 3 or value.shape[1:] != first.shape[1:] or not needed <= value.shape[0] <= length - 1:
            raise ValueError(
                f"{name} has routed experts of shape {tuple(value.shape)} for {length} tokens, expected "
                f"{(length - 1, *first.shape[1:])}: one row per token but the last"
            )
        if value.numel() and int(value.min()) < 0:
            raise ValueError(f"{name} has the routed expert {int(value.min())}: the engine left a choice out")
        largest = max(largest, int(value.max()) if value.numel() else 0)
    dtype = torch.uint8 if largest < 256 else torch.int16
    _, layers, topk = first.shape
    filler = torch.arange(topk, dtype=dtype)  # distinct, as an engine's are

    def whole(value: torch.Tensor | None, length: int) -> torch.Tensor:
        rows = filler.new_empty(0, layers, topk) if value is None else value.to(dtype)
        return torch.cat([rows, filler.expand(length - 1 - len(rows), layers, topk)])

    return [whole(value, length) for value, length in zip(known, total_lengths, strict=True)]


def check_routed_experts(
    experts: Sequence[torch.Tensor],
    *,
    num_layers: int,
    topk: int,
    moe_layers: Sequence[int],
    num_experts: int | None = None,
) -> None:
    """Raise where replaying the choices could not be right.

    Args:
        experts: per sample ``[rows, num_layers, topk]``.
        moe_layers: numbers of the layers with experts, from 0; only these are looked at.

    Raises:
        ValueError: no samples, another shape, no rows, numbers that are no experts, or a token that goes to the same
            expert twice (an engine that recorded nothing leaves zeros).
    """
    if not experts:
        raise ValueError("there are no routed experts to replay: the list of samples is empty")
    for index, value in enumerate(experts):
        if value.dim() != 3 or tuple(value.shape[1:]) != (num_layers, topk):
            raise ValueError(
                f"Invalid rollout routed-experts shape {tuple(value.shape)} of sample {index}: expected (rows, "
                f"{num_layers}, {topk}), for all layers and the experts per token of the model"
            )
        if not len(value):
            raise ValueError(f"Invalid rollout routed-experts shape {tuple(value.shape)} of sample {index}: no rows")
        chosen = value[:, list(moe_layers)]
        if topk > 1:
            empty = [layer for layer in moe_layers if not bool(value[:, layer].any())]
            if empty:
                raise ValueError(f"the routed experts of sample {index} are all zero in layers {empty}")
            if any(bool((chosen[..., a] == chosen[..., b]).any()) for a, b in combinations(range(topk), 2)):
                raise ValueError(f"the routed experts of sample {index} name one expert twice for the same token")
        if num_experts is not None and chosen.numel() and int(chosen.max()) >= num_experts:
            raise ValueError(
                f"the routed experts of sample {index} hold the number {int(chosen.max())}, but a layer has "
                f"{num_experts} experts"
            )


def validate_rollout_routed_experts_for_replay(routed_experts: list[torch.Tensor], args: Any) -> None:
    """:func:`check_routed_experts` with the model that ``args`` describe: ``num_layers``, ``moe_router_topk`` and
    ``moe_layer_freq`` (a list with an entry per layer; every layer has experts without one)."""
    pattern = getattr(args, "moe_layer_freq", None)
    layers = range(args.num_layers)
    check_routed_experts(
        routed_experts,
        num_layers=args.num_layers,
        topk=args.moe_router_topk,
        moe_layers=[i for i in layers if pattern[i]] if isinstance(pattern, list | tuple) else list(layers),
        num_experts=getattr(args, "num_experts", None),
    )
