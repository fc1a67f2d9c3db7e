"""Several samples in one packed row: variable-length attention instead of padding.

    tokens        p p p r r | p p r r r | 0 0      | = segment border, the last segment is padding
    position ids  0 1 2 3 4 | 0 1 2 3 4 | 0 1
    response rows     2 3       6 7 8              the logits of row t predict token t + 1

Called by a trainer once per micro-batch. Does not depend on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slime.utils.errors import DataError


@dataclass(frozen=True)
class PackedSequences:
    """One micro-batch as the model sees it. All tensors are on one device.

    Attributes:
        tokens: ``[1, T]`` int64, padding is token 0.
        position_ids: ``[1, T]`` int64, from 0 in every segment.
        cu_seqlens: ``[S + 1]`` int32, borders of the segments. Padding, if any, is one more segment.
        max_seqlen: longest segment.
        borders: ``cu_seqlens`` on the host.
        is_padding: bool ``[1, T]``, rows after a sample's end. None if no segment of the micro-batch has such rows.
        response_rows: ``[N]`` int64, the row whose logits predict each response token. Samples in order.
        response_targets: ``[N]`` int64, the response tokens.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    borders: tuple[int, ...]
    is_padding: torch.Tensor | None
    response_rows: torch.Tensor
    response_targets: torch.Tensor

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
) -> PackedSequences:
    """Concatenate samples, each padded at its end to a multiple of ``segment_multiple``, the total to ``pad_multiple``.

    Args:
        tokens: per sample ``[L_i]`` int64, prompt then response.
        response_lengths: ``R_i``. 0 is allowed.
        segment_multiple: context parallelism cuts every segment into this many equal pieces.
        pad_multiple: a multiple of ``segment_multiple``. The padding is one more segment.
        device: of the result (default: the device of the tokens).

    Raises:
        DataError: no samples, an empty sample, or a response without a prompt token to predict it from.
    """
    lengths = [int(t.numel()) for t in tokens]
    if not lengths:
        raise DataError("cannot pack a micro-batch without samples")
    for i, (length, response) in enumerate(zip(lengths, response_lengths, strict=True)):
        if length < 1 or not 0 <= response < max(length, 1):
            raise DataError(
                f"sample {i} of the micro-batch has {length} tokens with {response} of them in the response: it needs "
                "at least one prompt token"
            )
    device = tokens[0].device if device is None else torch.device(device)
    # -n % m is the distance from n to the next multiple of m
    segments = [length + -length % segment_multiple for length in lengths]
    rows_of = [t.reshape(-1) for t in tokens]
    if segments != lengths:
        rows_of = [
            torch.nn.functional.pad(row, (0, segment - row.numel()))
            for row, segment in zip(rows_of, segments, strict=True)
        ]
    flat = torch.cat(rows_of)
    padding = -flat.numel() % pad_multiple
    if padding:
        # a separate segment: padding must not make the last sample longer
        segments.append(padding)
        flat = torch.nn.functional.pad(flat, (0, padding))

    # indices are computed on the host and copied once, instead of many small kernels on the device
    counts = torch.tensor(segments)
    ends = counts.cumsum(0)
    starts = ends - counts
    position_ids = torch.arange(flat.numel()) - starts.repeat_interleave(counts)
    responses = torch.tensor(list(response_lengths))
    # the response of sample i is predicted by the R_i rows that end one before the sample's last row
    first_row = starts[: len(lengths)] + torch.tensor(lengths) - responses - 1
    within = torch.arange(int(responses.sum())) - (responses.cumsum(0) - responses).repeat_interleave(responses)
    rows = first_row.repeat_interleave(responses) + within
    num_real = torch.tensor(lengths + [0] * (len(segments) - len(lengths)))
    packed = PackedSequences(
        tokens=flat.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        # int32: attention kernels take no other borders
        cu_seqlens=torch.nn.functional.pad(ends, (1, 0)).int(),
        max_seqlen=max(segments),
        borders=(0, *ends.tolist()),
        is_padding=None if segments == lengths else (position_ids >= num_real.repeat_interleave(counts)).unsqueeze(0),
        response_rows=rows,
        response_targets=flat[(rows + 1).to(flat.device)],
    )
    return packed.to(device)
