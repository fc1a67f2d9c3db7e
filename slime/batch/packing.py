"""Several samples in one packed row: variable-length attention instead of padding.

    tokens        p p p r r | p p r r r | 0 0      | = segment border, the last segment is padding
    position ids  0 1 2 3 4 | 0 1 2 3 4 | 0 1
    response rows     2 3       6 7 8              the logits of row t predict token t + 1

With shared prefixes a sample's segment has only the tokens that the sample before it lacks. Its other rows are among
those of that sample. Two samples that continue a row differently read its logits twice, for two targets.

    samples       p p p r r    p p p s    p p p r r    p t
    tokens        p p p r r  | s |      | t
    position ids  0 1 2 3 4  | 3 |      | 1             the third sample is the first one again
    response rows 2 2 3 0                               with targets r s r t

Called by a trainer once per micro-batch. Does not depend on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from slime.utils.errors import DataError


@dataclass(frozen=True)
class PackedSequences:
    """One micro-batch as the model sees it. All tensors are on one device.

    Attributes:
        tokens: ``[1, T]`` int64, padding is token 0.
        position_ids: ``[1, T]`` int64, from 0 in every segment.
        cu_seqlens: ``[S + 1]`` int32, borders of the segments. Padding, if any, is one more segment.
        max_seqlen: longest segment, with the prefix that it shares.
        borders: ``cu_seqlens`` on the host.
        is_padding: bool ``[1, T]``, rows after a sample's end. None if no segment of the micro-batch has such rows.
        response_rows: ``[N]`` int64, the row whose logits predict each response token. Samples in order. With shared
            prefixes each pair of row and target once, P in all.
        response_targets: ``[N]`` or ``[P]`` int64, the response tokens.
        shared: tokens of each sample that are rows of the sample before it. None without shared prefixes.
        num_holders: int32 ``[1, T]``, samples that have the row, 0 for padding. None without shared prefixes.
        response_pairs: ``[N]`` int64, the pair of each response token. None if each has a separate one.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    borders: tuple[int, ...]
    is_padding: torch.Tensor | None
    response_rows: torch.Tensor
    response_targets: torch.Tensor
    shared: tuple[int, ...] | None = None
    num_holders: torch.Tensor | None = None
    response_pairs: torch.Tensor | None = None

    def to(self, device: torch.device) -> PackedSequences:
        """The same on ``device``, without a wait for it."""
        moved: dict[str, Any] = {
            name: copy_to(value, device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``. A copy from pageable memory would wait until the device has run all its work."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def pack(
    tokens: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    *,
    segment_multiple: int = 1,
    pad_multiple: int = 1,
    device: torch.device | str | None = None,
    shared: Sequence[int] | None = None,
    joins_targets: bool = True,
) -> PackedSequences:
    """Concatenate samples, each padded at its end to a multiple of ``segment_multiple``, the total to ``pad_multiple``.

    Args:
        tokens: per sample ``[L_i]`` int64, prompt then response.
        response_lengths: ``R_i``. 0 is allowed.
        segment_multiple: context parallelism cuts every segment into this many equal pieces.
        pad_multiple: a multiple of ``segment_multiple``. The padding is one more segment.
        device: of the result (default: the device of the tokens).
        shared: tokens that each sample shares with the one before it, in the order of a ``PrefixTree``. Needs a
            ``segment_multiple`` of 1.
        joins_targets: with shared prefixes, equal targets of a row are one pair.

    Raises:
        DataError: no samples, an empty sample, or a response without a prompt token to predict it from.
    """
    lengths = [int(t.numel()) for t in tokens]
    _check(lengths, response_lengths)
    device = tokens[0].device if device is None else torch.device(device)
    shared_of = [0] * len(lengths) if shared is None else list(shared)
    own = [length - prefix for length, prefix in zip(lengths, shared_of, strict=True)]
    # -n % m is the distance from n to the next multiple of m
    segments = [length + -length % segment_multiple for length in own]
    rows_of = [t.reshape(-1)[prefix:] for t, prefix in zip(tokens, shared_of, strict=True)]
    if segments != own:
        rows_of = [F.pad(row, (0, segment - len(row))) for row, segment in zip(rows_of, segments, strict=True)]
    flat = torch.cat(rows_of)
    padding = -flat.numel() % pad_multiple
    if padding:
        # a separate segment: padding must not make the last sample longer
        segments.append(padding)
        flat = F.pad(flat, (0, padding))

    # indices are computed on the host and copied once, instead of many small kernels on the device
    counts = torch.tensor(segments)
    ends = counts.cumsum(0)
    starts = ends - counts
    first_position = torch.tensor(shared_of + [0] * (len(segments) - len(lengths)))
    within = torch.arange(flat.numel()) - starts.repeat_interleave(counts)
    num_real = torch.tensor(own + [0] * (len(segments) - len(own)))
    is_padding = None if segments == own else (within >= num_real.repeat_interleave(counts)).unsqueeze(0)
    extra: dict[str, Any] = {}
    if shared is None:
        rows = _response_rows(starts, lengths, response_lengths)
        targets = flat[(rows + 1).to(flat.device)]
    else:
        rows, targets, extra = _shared_rows(tokens, response_lengths, starts.tolist(), shared_of, flat.numel())
        if joins_targets:
            # pairs as one number, so that they are sorted by rows
            pairs, extra["response_pairs"] = torch.unique((rows << 32) + targets, return_inverse=True)
            rows, targets = pairs >> 32, pairs & (2**32 - 1)
    packed = PackedSequences(
        tokens=flat.unsqueeze(0),
        position_ids=(within + first_position.repeat_interleave(counts)).unsqueeze(0),
        # int32: attention kernels take no other borders
        cu_seqlens=F.pad(ends, (1, 0)).int(),
        max_seqlen=max(*segments, *lengths),
        borders=(0, *ends.tolist()),
        is_padding=is_padding,
        response_rows=rows,
        response_targets=targets,
        **extra,
    )
    return packed.to(device)


def _check(lengths: Sequence[int], response_lengths: Sequence[int]) -> None:
    if not lengths:
        raise DataError("cannot pack a micro-batch without samples")
    for i, (length, response) in enumerate(zip(lengths, response_lengths, strict=True)):
        if length < 1 or not 0 <= response < max(length, 1):
            raise DataError(
                f"sample {i} of the micro-batch has {length} tokens with {response} of them in the response: it needs "
                "at least one prompt token"
            )


def _response_rows(starts: torch.Tensor, lengths: list[int], response_lengths: Sequence[int]) -> torch.Tensor:
    responses = torch.tensor(list(response_lengths))
    # the response of sample i is predicted by the R_i rows that end one before the sample's last row
    first_row = starts[: len(lengths)] + torch.tensor(lengths) - responses - 1
    within = torch.arange(int(responses.sum())) - (responses.cumsum(0) - responses).repeat_interleave(responses)
    return first_row.repeat_interleave(responses) + within


def rows_of_samples(borders: Sequence[int], shared: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The rows of each sample with shared prefixes, as spans (first row, rows), in the order of its tokens.

    Args:
        borders: of the segments, each with the rows that the sample before it lacks.
    """
    spans: list[list[tuple[int, int]]] = []
    for number, prefix in enumerate(shared):
        mine, missing = [], prefix
        for begin, length in spans[-1] if spans else ():
            if missing > 0:
                mine.append((begin, min(length, missing)))
                missing -= length
        own = borders[number + 1] - borders[number]
        if own:
            if mine and sum(mine[-1]) == borders[number]:
                mine[-1] = (mine[-1][0], mine[-1][1] + own)
            else:
                mine.append((borders[number], own))
        spans.append(mine)
    return spans


def _shared_rows(
    tokens: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    starts: Sequence[int],
    shared: Sequence[int],
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Row and target of each response token, and the fields that only shared prefixes need."""
    borders = [*starts[: len(shared)], starts[len(shared) - 1] + tokens[-1].numel() - shared[-1]]
    num_holders = torch.zeros(num_rows, dtype=torch.int32)
    rows, targets = [], []
    for sample, response, spans in zip(tokens, response_lengths, rows_of_samples(borders, shared), strict=True):
        mine = torch.cat([torch.arange(begin, begin + length) for begin, length in spans])
        num_holders[mine] += 1
        rows.append(mine[len(mine) - response - 1 : -1])
        targets.append(sample.reshape(-1)[len(mine) - response :])
    return torch.cat(rows), torch.cat(targets), {"shared": tuple(shared), "num_holders": num_holders.unsqueeze(0)}
