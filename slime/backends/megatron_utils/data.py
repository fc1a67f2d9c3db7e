"""The rank's batch as the model reads it: packed micro-batches on the device, one step's at a time.

Called by ``forward`` and ``step``. The schedule (which samples in which micro-batch) is made in ``slime.batch``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from slime.backends.megatron_utils.attention import PackedSegments, packed_segments
from slime.batch.packing import PackedSequences, pack

__all__ = ["MicroBatch", "TrainBatch"]


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of the rank, packed.

    Attributes:
        indices: their positions in the rank's batch.
        packed: tokens and where the response tokens' logits are.
        segments: the same boundaries as Megatron's attention reads them.
        response_lengths: R_i.
    """

    indices: Sequence[int]
    packed: PackedSequences
    segments: PackedSegments
    response_lengths: list[int]


class TrainBatch:
    """The per-rank dictionary with the columns of ``slime.data.columns``, and views of it."""

    def __init__(self, columns: dict[str, Any], device: torch.device) -> None:
        self.columns = columns
        self._device = device
        ends = list(accumulate(columns["num_microbatches"], initial=0))
        micro_batches = columns["micro_batch_indices"]
        if ends[-1] != len(micro_batches):
            raise ValueError(f"{len(micro_batches)} micro-batches, but the steps have {ends[-1]}")
        if sorted(index for indices in micro_batches for index in indices) != list(range(len(columns["tokens"]))):
            raise ValueError(f"the schedule must name each of the {len(columns['tokens'])} samples exactly once")
        self._steps = [micro_batches[a:b] for a, b in pairwise(ends)]

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def num_samples(self) -> int:
        return len(self.columns["tokens"])

    def num_micro_batches(self, step: int) -> int:
        return len(self._steps[step])

    def num_rollouts(self, step: int) -> int:
        """Rollouts of the step over all ranks: what the loss is divided by."""
        return int(self.columns["global_batch_sizes"][step])

    @property
    def num_rollouts_in_all(self) -> int:
        return sum(self.columns["global_batch_sizes"])

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        for indices in self._steps[step]:
            response_lengths = self.select("response_lengths", indices)
            packed = pack(self.select("tokens", indices), response_lengths, device=self._device)
            segments = packed_segments(packed.cu_seqlens, packed.max_seqlen)
            yield MicroBatch(indices, packed, segments, response_lengths)

    def select(self, name: str, indices: Sequence[int]) -> list[Any]:
        column = self.columns[name]
        return [column[index] for index in indices]

    def flat(self, name: str, indices: Sequence[int]) -> torch.Tensor | None:
        """A per-response-token column of some samples behind one another, ``[N]`` on the device; None if absent."""
        if self.columns.get(name) is None:
            return None
        return torch.cat(self.select(name, indices)).to(self._device)

    def masks(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return [mask.to(self._device) for mask in self.select("loss_masks", indices)]

    def mask_sums(self, indices: Sequence[int]) -> torch.Tensor:
        return self.columns["rollout_mask_sums"][torch.as_tensor(indices, dtype=torch.int64)].to(self._device)
