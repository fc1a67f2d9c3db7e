"""Past bugs of this project, put back one at a time: the simulator must find each.

Each entry undoes one fix. ``fixed_in`` is the commit that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.simulation import disk
from tests.simulation.faults import Fault
from tests.simulation.threads import Namespace

Put = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Bug:
    """One bug.

    Attributes:
        what: the symptom.
        fixed_in: the commit with the fix.
        put_back: replaces names, so that the fix has no effect.
        seeds: schedules that found it. A change of the control plane moves the faults to other moments.
        mode: of the run. None: the seed chooses.
        fault: the only fault of the schedules. None: the seed chooses.
    """

    what: str
    fixed_in: str
    put_back: Callable[[Put], None]
    seeds: tuple[int, ...]
    mode: str | None = None
    fault: Fault | None = None

    @property
    def faults(self) -> list[Fault] | None:
        return None if self.fault is None else [self.fault]

    @contextmanager
    def present(self) -> Iterator[None]:
        with ExitStack() as patches:
            self.put_back(lambda target, name, value: patches.enter_context(mock.patch.object(target, name, value)))
            yield


def _position_of_the_checkpoint(put: Put) -> None:
    """The data state is saved with the checkpoint, when later rollouts have drawn prompts already."""
    from slime.ray.journal import Journal
    from slime.ray.rollout import RolloutManager
    from slime.ray.run.loop import Run

    generate, save = RolloutManager.generate, Run.save
    put(Journal, "of", lambda args: None)  # it saves the state after every rollout
    put(
        RolloutManager, "generate", lambda self, rollout_id, saves_state=False, version=None: generate(self, rollout_id)
    )

    def save_both(self: Any, rollout_id: int) -> None:
        self.handles.data_buffer.save(rollout_id)
        save(self, rollout_id)

    put(Run, "save", save_both)


def _forgets_groups_under_way(put: Put) -> None:
    """The Data Buffer saves the position only, not the groups under way."""
    from slime.ray import data_buffer

    put(data_buffer, "save_groups", lambda path, groups: None)


def _unflushed_data_state(put: Put) -> None:
    """The data state is not flushed before the checkpoint counts on it."""
    from slime.rollout import source_state
    from slime.utils.files import replacing

    put(source_state, "replacing", lambda path, sync=False: replacing(path))


def _unflushed_trained_line(put: Put) -> None:
    """The ledger's line ``trained`` is not flushed before the checkpoint."""
    from slime.data import ledger

    last: list[bytes] = []

    def write(descriptor: int, data: bytes) -> int:
        last[:] = [data]
        return int(disk.OS.write(descriptor, data))

    def fsync(descriptor: int) -> None:
        if b'"trained"' not in last[0]:
            disk.OS.fsync(descriptor)

    put(ledger, "os", Namespace(disk.OS, write=write, fsync=fsync))


def _one_id_for_all_attempts(put: Put) -> None:
    """Attempts of a request share one id, and the engine refuses the second while the first one runs."""
    from slime.rollout import engine_request
    from slime.rollout.engine_request import EngineRequest

    def new_attempt(self: EngineRequest) -> dict[str, Any]:
        self.rids[:] = self.rids or [f"{id(self)}"]
        return self.payload | {"rid": self.rids[0]}

    put(EngineRequest, "new_attempt", new_attempt)
    put(engine_request, "_IS_COPY", "nothing is repeated")  # a later fix, which hides this bug


BUGS: dict[str, Bug] = {
    "resume position": Bug(
        "prompts that later rollouts had drawn were lost after a restart of train_async.py",
        "f4e1108",
        _position_of_the_checkpoint,
        (0, 4),
        "train_async",
    ),
    "groups under way": Bug(
        "prompts under way were lost after a restart of fully asynchronous generation",
        "1fe7080",
        _forgets_groups_under_way,
        (0, 1),
        "fully async",
    ),
    "unflushed data state": Bug(
        "after a power failure the data state of the checkpoint was damaged", "a8411c5", _unflushed_data_state, (37, 41)
    ),
    "unflushed trained line": Bug(
        "after a power failure the ledger reported trained prompts as lost",
        "a8411c5",
        _unflushed_trained_line,
        (0, 2),
        "train",
        Fault(262, "power failure"),  # between the line and the next flush of the ledger
    ),
    "one id for all attempts": Bug(
        "an engine refused the repetition of a request whose first attempt was lost but still ran",
        "9ad1759",
        _one_id_for_all_attempts,
        (86, 112),
    ),
}
