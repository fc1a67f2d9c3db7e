"""The ids that each token was sampled from, if top-p or top-k cut the vocabulary.

The engine sampled from ``softmax(z)`` cut to a set S and scaled up to 1. The policy that trains is the same cut,

    pi_S(v) = exp(z_v) / sum_{u in S} exp(z_u)    for v in S,

with the engine's S for old and new weights. S is recorded and not computed again, because a set from the trainer's
logits may lack the token that was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
