"""How the trainer's ranks talk to each other during a weight update: who failed, and what goes to which engine.

Only small Python objects travel here, over gloo, whatever the trainer itself uses. Called by the session, the senders
and the updater, on all ranks at once. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ALONE", "TrainerRanks"]


class TrainerRanks:
    """This rank among the others. Rank 0 is the source: it speaks with the engines about the session.

    Args:
        timeout_s: longest wait for the other ranks.
    """

    def __init__(self, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timedelta(seconds=timeout_s)
        self._all: ProcessGroup | None = None

    @property
    def is_source(self) -> bool:
        return self.rank == 0

    def group(self, members: Sequence[int]) -> ProcessGroup | None:
        """A gloo group of ``members``, None for a rank alone. All ranks call this, with the same members."""
        import torch.distributed as dist

        if len(members) < 2:
            return None
        group: ProcessGroup = dist.new_group(list(members), timeout=self._timeout, backend="gloo")
        return group

    def agree(self, problem: str | None) -> list[str]:
        """What went wrong on any rank, in their order; empty when all are well. A meeting of all ranks."""
        return [said for said in self._say(problem) if said is not None]

    def from_source(self, value: Any) -> Any:
        """What the source passed. A meeting of all ranks."""
        return self._say(value if self.is_source else None)[0]

    def _say(self, value: Any) -> list[Any]:
        if self.size > 1 and self._all is None:
            self._all = self.group(range(self.size))
        return self.gather(value, self._all)

    @staticmethod
    def gather(value: Any, group: ProcessGroup | None) -> list[Any]:
        """What every rank of ``group`` passed, in their order. Returns when all of them have called this."""
        import torch.distributed as dist

        if group is None:
            return [value]
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, value, group=group)
        return said


ALONE = TrainerRanks(0, 1, timeout_s=60.0)
"""A trainer of one rank."""
