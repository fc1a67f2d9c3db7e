"""From an engine's reply to a longer sample: the one place where generated tokens are appended.

Called through ``Sample.append_response_tokens`` by the default rollout, custom generate functions and agents. Keeps
tokens, mask, log-probs, top-p arrays, routed experts, counters and status aligned, and refuses what does not fit.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, combinations
from typing import Any

import numpy as np
import torch

from slime.data.sample import Sample
from slime.data.sampling_mask import SAMPLING_MASK

_FINISH_TO_STATUS = {
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
    "stop": Sample.Status.COMPLETED,
}
_TOP_P_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
_TOP_P_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")


def decode_int32_meta_array(meta_info: dict[str, Any], keys: str | Iterable[str]) -> torch.Tensor | None:
    """Flat int32 CPU tensor under the first of ``keys`` that is present; None if that value is None or none is there.

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


def append_response_tokens(
    sample: Sample,
    args: Any = None,
    *,
    tokens: Any = None,
    log_probs: Any = None,
    trainable: bool = True,
    meta_info: dict[str, Any] | None = None,
    text: str | None = None,
    update_terminal_info: bool = True,
) -> None:
    """See :meth:`slime.data.sample.Sample.append_response_tokens`."""
    new_tokens = [] if tokens is None else [int(token) for token in _flat_list(tokens)]
    new_log_probs = _checked_log_probs(sample, new_tokens, log_probs, trainable)
    old_length = sample.response_length
    if new_tokens or text:
        _restore_stop_text(sample)
    if text is not None:
        sample.response += text
    if new_tokens:
        sample.tokens += new_tokens  # every list grows in place: callers keep aliases of them
        sample.response_length += len(new_tokens)
        if sample.loss_mask is None:
            sample.loss_mask = [1] * old_length
        sample.loss_mask += [int(trainable)] * len(new_tokens)
    if new_log_probs is not None:
        if sample.rollout_log_probs is None:
            if trainable and old_length > 0:
                raise ValueError(
                    f"sample {sample.index}: its first {old_length} response tokens have no rollout log probabilities, "
                    "so those of the following tokens cannot be aligned"
                )
            sample.rollout_log_probs = [0.0] * old_length
        sample.rollout_log_probs += new_log_probs
    if meta_info is not None or (new_tokens and not trainable):
        _apply_meta(sample, args, meta_info or {}, len(new_tokens), trainable, update_terminal_info)
    _check_lengths(sample)


def _restore_stop_text(sample: Sample) -> None:
    """The response goes on behind a stop token, whose text ``slime.rollout.engine_request`` removed: put it back."""
    length, text = vars(sample).pop("stop_text", (None, ""))
    if length == len(sample.response):  # otherwise a custom function appended text by itself
        sample.response += text


def _flat_list(values: Any) -> Sequence[Any]:
    return values.detach().flatten().tolist() if isinstance(values, torch.Tensor) else list(values)


def _checked_log_probs(sample: Sample, tokens: list[int], log_probs: Any, trainable: bool) -> list[float] | None:
    values = None if log_probs is None else [float(value) for value in _flat_list(log_probs)]
    if values is not None and len(values) != len(tokens):
        raise ValueError(f"sample {sample.index}: {len(values)} log probabilities for {len(tokens)} tokens")
    if trainable:
        if tokens and values is None:
            raise ValueError(f"sample {sample.index}: trainable response tokens require rollout log probabilities")
        return values
    if not tokens:
        return values
    if values is not None and any(values):
        raise ValueError(
            f"sample {sample.index}: non-trainable response tokens should not pass rollout log probabilities"
        )
    return [0.0] * len(tokens)


def _apply_meta(
    sample: Sample, args: Any, meta: dict[str, Any], num_new: int, trainable: bool, update_terminal_info: bool
) -> None:
    if num_new:
        _apply_top_p(sample, meta, num_new, pad_missing=not trainable)
    _apply_routed_experts(sample, args, meta)
    if not update_terminal_info or "finish_reason" not in meta:
        return
    if args is not None and getattr(args, "sglang_speculative_algorithm", None):
        sample.spec_info.add(meta)
    sample.prefix_cache_info.add(meta)
    if "weight_version" in meta:
        sample.weight_versions.append(meta["weight_version"])
    finish = meta["finish_reason"] or {}
    sample.status = _FINISH_TO_STATUS.get(str(finish.get("type")), sample.status)


def _apply_top_p(sample: Sample, meta: dict[str, Any], num_new: int, pad_missing: bool) -> None:
    """Merge the nuclei of ``num_new`` tokens into the sample's CSR arrays (ids, offsets)."""
    ids: torch.Tensor | None
    offsets: torch.Tensor | None
    if meta.get(SAMPLING_MASK) is not None:
        ids, offsets = _sets_of_masks(meta[SAMPLING_MASK])
    else:
        ids = decode_int32_meta_array(meta, _TOP_P_IDS)
        offsets = decode_int32_meta_array(meta, _TOP_P_OFFSETS)
    if ids is None and offsets is None:
        if pad_missing and sample.rollout_top_p_token_offsets is not None:
            old = torch.as_tensor(sample.rollout_top_p_token_offsets, dtype=torch.int32)
            sample.rollout_top_p_token_offsets = torch.cat([old, old[-1:].repeat(num_new)])
        return
    if ids is None or offsets is None:
        raise ValueError(f"sample {sample.index}: top-p token ids and offsets must come together")
    if offsets.numel() == 0 or int(offsets[0]) != 0:
        raise ValueError(f"sample {sample.index}: top-p offsets must start with 0, got {offsets[:1].tolist()}")
    if int(offsets[-1]) != ids.numel():
        raise ValueError(f"sample {sample.index}: the last top-p offset is {int(offsets[-1])} for {ids.numel()} ids")
    if offsets.numel() != num_new + 1:
        raise ValueError(f"sample {sample.index}: {offsets.numel()} top-p offsets for {num_new} new tokens")
    if sample.rollout_top_p_token_ids is None:
        # tokens that came before the first nucleus (tool output) have empty spans
        earlier = sample.response_length - num_new
        sample.rollout_top_p_token_ids = ids
        sample.rollout_top_p_token_offsets = torch.cat([torch.zeros(earlier, dtype=torch.int32), offsets])
        return
    old_ids = torch.as_tensor(sample.rollout_top_p_token_ids, dtype=torch.int32)
    old_offsets = torch.as_tensor(sample.rollout_top_p_token_offsets, dtype=torch.int32)
    sample.rollout_top_p_token_ids = torch.cat([old_ids, ids])
    sample.rollout_top_p_token_offsets = torch.cat([old_offsets, offsets[1:] + old_offsets[-1]])


def _sets_of_masks(masks: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, offsets) int32 of one list of ids per token."""
    ids = torch.tensor(list(chain.from_iterable(masks)), dtype=torch.int32)
    return ids, torch.tensor([0, *accumulate(map(len, masks))], dtype=torch.int32)


def _apply_routed_experts(sample: Sample, args: Any, meta: dict[str, Any]) -> None:
    flat = decode_int32_meta_array(meta, "routed_experts")
    if flat is None:
        return
    if args is None:
        raise ValueError("routed experts need args (num_layers, moe_router_topk) to get their shape")
    start = int(meta.get("routed_experts_start_len") or 0)
    if start < 0:
        raise ValueError(f"sample {sample.index}: routed_experts_start_len is {start}")
    rows = max(0, len(sample.tokens) - 1 - start)
    expected = rows * args.num_layers * args.moe_router_topk
    if flat.numel() != expected:
        raise ValueError(
            f"sample {sample.index}: routed_experts element count is {flat.numel()}, expected {expected} "
            f"({rows} positions x {args.num_layers} layers x top {args.moe_router_topk})"
        )
    experts = flat.reshape(rows, args.num_layers, args.moe_router_topk)
    if start > 0:
        existing = sample.rollout_routed_experts
        if existing is None or len(existing) < start:
            have = 0 if existing is None else len(existing)
            raise ValueError(f"sample {sample.index}: routed experts start at {start}, but only {have} rows exist")
        experts = torch.cat([torch.as_tensor(existing, dtype=torch.int32)[:start], experts])
    sample.rollout_routed_experts = experts


def _check_lengths(sample: Sample) -> None:
    length = sample.response_length
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        if values is not None and len(values) != length:
            raise ValueError(f"sample {sample.index}: {name} has {len(values)} entries for {length} response tokens")
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if (ids is None) != (offsets is None):
        raise ValueError(f"sample {sample.index}: top-p token ids and offsets must come together")
    if offsets is None:
        return
    if len(offsets) != length + 1:
        raise ValueError(f"sample {sample.index}: {len(offsets)} top-p offsets for {length} response tokens")
    if int(offsets[-1]) != len(ids):
        raise ValueError(f"sample {sample.index}: the last top-p offset is {int(offsets[-1])} for {len(ids)} ids")


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
