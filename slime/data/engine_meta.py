"""Arrays that engines return per token: vocabulary cuts (top-p sets) and routed experts.

Called by ``Sample.append_response_tokens``, where samples become columns, and by the trainer. Imports torch, so
``slime.data.sample`` imports this module on first use.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, combinations
from typing import Any

import numpy as np
import torch

from slime.data.engine_fields import SAMPLING_MASK

_TOP_P_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
_TOP_P_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")
_EXPERTS = "routed_experts"
_PIECE = 2**20
"""Characters of base64, a multiple of 16: whole numbers. Decoding a piece takes a millisecond."""


def decode_int32_meta_array(meta_info: dict[str, Any], keys: str | Iterable[str]) -> torch.Tensor | None:
    """Flat int32 CPU tensor under the first present key of ``keys``; None if its value is None or no key is present.

    A string is base64 of little-endian int32 bytes, bytes are those bytes, anything else is a tensor, array or list.
    """
    names = (keys,) if isinstance(keys, str) else tuple(keys)
    value = next((meta_info[name] for name in names if name in meta_info), None)
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value.detach().to(device="cpu", dtype=torch.int32).flatten()
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, bytes | bytearray | memoryview):
        value = np.frombuffer(value, dtype="<i4")
    return torch.from_numpy(np.array(value, dtype=np.int32).reshape(-1))  # np.array copies: sources may be read-only


def has_large_array(reply: Any) -> bool:
    """Whether :func:`pack_routed_experts` has more to do than an event loop should wait for."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    value = meta.get(_EXPERTS) if isinstance(meta, dict) else None
    return isinstance(value, str) and len(value) > _PIECE


def pack_routed_experts(meta: dict[str, Any]) -> None:
    """Replace the base64 text of the routed experts by ``(name of a numpy dtype, bytes)`` of the smallest integers.

    A response of 32,000 tokens of a model with 58 layers of 8 chosen experts has 79 MB of text, 59 MB of int32, and
    15 MB if its experts are less than 256. Works in pieces, so that other threads get the interpreter in between.
    """
    text = meta.get(_EXPERTS)
    if not isinstance(text, str):
        return
    pieces = []
    for start in range(0, len(text), _PIECE):
        numbers = np.frombuffer(base64.b64decode(text[start : start + _PIECE]), dtype="<i4")
        pieces.append(numbers.astype(_narrowest(int(numbers.min(initial=0)), int(numbers.max(initial=0)))))
    whole = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
    meta[_EXPERTS] = (whole.dtype.name, whole.tobytes())


_DTYPES = {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}


def _narrowest(least: int, most: int) -> str:
    """A dtype that holds the numbers. One below 0, which no expert has, stays as it is for the message about it."""
    if least >= 0 and most < 2**8:
        return "uint8"
    return "int16" if max(-least - 1, most) < 2**15 else "int32"


def _routed_experts(meta: dict[str, Any]) -> torch.Tensor | None:
    """The numbers in ``meta``, flat."""
    meta = {_EXPERTS: meta.get(_EXPERTS)}
    pack_routed_experts(meta)
    if isinstance(meta[_EXPERTS], tuple):
        name, data = meta[_EXPERTS]
        return torch.from_numpy(np.frombuffer(bytearray(data), dtype=name))  # torch warns of read-only bytes
    flat = decode_int32_meta_array(meta, _EXPERTS)
    return flat if flat is None or not flat.numel() else _narrow(flat)


def _narrow(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(_DTYPES[_narrowest(int(numbers.min()), int(numbers.max()))])


def flat_list(values: Any) -> Sequence[Any]:
    """A tensor or an iterable as a flat list."""
    return values.detach().flatten().tolist() if isinstance(values, torch.Tensor) else list(values)


def extend_sets(
    name: str, ids: Any, offsets: Any, response_length: int, meta: dict[str, Any], num_new: int, *, pads_missing: bool
) -> tuple[Any, Any]:
    """Append the sets of ``num_new`` tokens to a sample's CSR arrays (ids ``[K]``, offsets ``[response_length + 1]``).

    Args:
        name: of the sample, for errors.
        response_length: with the new tokens.
        pads_missing: new tokens without sets get empty ones.

    Raises:
        ValueError: arrays of the engine that do not fit together.
    """
    new_ids: torch.Tensor | None
    new_offsets: torch.Tensor | None
    if meta.get(SAMPLING_MASK) is not None:
        masks = meta[SAMPLING_MASK]
        new_ids = torch.tensor(list(chain.from_iterable(masks)), dtype=torch.int32)
        new_offsets = torch.tensor([0, *accumulate(map(len, masks))], dtype=torch.int32)
    else:
        new_ids = decode_int32_meta_array(meta, _TOP_P_IDS)
        new_offsets = decode_int32_meta_array(meta, _TOP_P_OFFSETS)
    if new_ids is None and new_offsets is None:
        if pads_missing and offsets is not None:
            old = torch.as_tensor(offsets, dtype=torch.int32)
            offsets = torch.cat([old, old[-1:].repeat(num_new)])
        return ids, offsets
    if new_ids is None or new_offsets is None:
        raise ValueError(f"{name}: top-p token ids and offsets must come together")
    if new_offsets.numel() == 0 or int(new_offsets[0]) != 0:
        raise ValueError(f"{name}: top-p offsets must start with 0, got {new_offsets[:1].tolist()}")
    if int(new_offsets[-1]) != new_ids.numel():
        raise ValueError(f"{name}: the last top-p offset is {int(new_offsets[-1])} for {new_ids.numel()} ids")
    if new_offsets.numel() != num_new + 1:
        raise ValueError(f"{name}: {new_offsets.numel()} top-p offsets for {num_new} new tokens")
    if ids is None:
        # Tokens before the first set (tool output) have empty ones.
        earlier = torch.zeros(response_length - num_new, dtype=torch.int32)
        return new_ids, torch.cat([earlier, new_offsets])
    old_ids, old_offsets = (torch.as_tensor(values, dtype=torch.int32) for values in (ids, offsets))
    return torch.cat([old_ids, new_ids]), torch.cat([old_offsets, new_offsets[1:] + old_offsets[-1]])


def extend_routed_experts(name: str, existing: Any, num_tokens: int, args: Any, meta: dict[str, Any]) -> Any:
    """The routed experts of a sample, ``[num_tokens - 1, layers, topk]`` of the smallest integers, after a reply.

    Raises:
        ValueError: a count that does not fit the tokens, or no ``args`` with the shape of the model.
    """
    flat = _routed_experts(meta)
    if flat is None:
        return existing
    if args is None:
        raise ValueError("routed experts need args (num_layers, moe_router_topk) to get their shape")
    start = int(meta.get("routed_experts_start_len") or 0)
    if start < 0:
        raise ValueError(f"{name}: routed_experts_start_len is {start}")
    # The last token has not been an input yet, so it has no row.
    rows = max(0, num_tokens - 1 - start)
    expected = rows * args.num_layers * args.moe_router_topk
    if flat.numel() != expected:
        raise ValueError(
            f"{name}: routed_experts element count is {flat.numel()}, expected {expected} "
            f"({rows} positions x {args.num_layers} layers x top {args.moe_router_topk})"
        )
    experts = flat.reshape(rows, args.num_layers, args.moe_router_topk)
    if start == 0:
        return experts
    if existing is None or len(existing) < start:
        have = 0 if existing is None else len(existing)
        raise ValueError(f"{name}: routed experts start at {start}, but only {have} rows exist")
    return torch.cat([_narrow(torch.as_tensor(existing)[:start]), experts])


def compact_routed_experts(
    values: Sequence[Any], total_lengths: Sequence[int], needed_rows: Sequence[int], names: Sequence[str]
) -> list[Any]:
    """The smallest integer tensors that hold the choices, ``[L - 1, layers, topk]``.

    Missing rows at the end, after all trained tokens, get any valid choices. A tool's output without a later request
    has no rows, and neither has a sample without trained tokens.

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
    # The array has layers x topk entries per token, so the smallest type is worth its cost.
    dtype = _DTYPES[_narrowest(0, largest)]
    _, layers, topk = first.shape
    filler = torch.arange(topk, dtype=dtype)  # distinct, as an engine's are

    def whole(value: torch.Tensor | None, length: int) -> torch.Tensor:
        rows = filler.new_empty(0, layers, topk) if value is None else value.to(dtype)
        if len(rows) == length - 1:
            return rows  # without a copy: these may be most of the memory of a sample
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
    """Check choices before they are replayed.

    Args:
        experts: per sample ``[rows, num_layers, topk]``.
        moe_layers: numbers of the layers with experts, from 0. Only these are checked.

    Raises:
        ValueError: no samples, another shape, no rows, numbers beyond the experts, or a token that goes to the same
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
        # With one expert per token zeros are valid choices.
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
    """Call :func:`check_routed_experts` with the model of ``args``.

    Reads ``num_layers``, ``moe_router_topk`` and ``moe_layer_freq``, a list with an entry per layer. Without the list
    every layer has experts.
    """
    pattern = getattr(args, "moe_layer_freq", None)
    layers = range(args.num_layers)
    check_routed_experts(
        routed_experts,
        num_layers=args.num_layers,
        topk=args.moe_router_topk,
        moe_layers=[i for i in layers if pattern[i]] if isinstance(pattern, list | tuple) else list(layers),
        num_experts=getattr(args, "num_experts", None),
    )
