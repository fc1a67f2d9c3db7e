"""``progress.json`` in the run's folder: the current phase of the run, for people and other programs.

    {"pid": 700, "pid_since": 1763..., "started": 1763..., "restarts": 0, "first_rollout": 0, "num_rollout": 100,
     "ledger": ".../ledger.jsonl", "state": "running",
     "trainer": {"phase": "train", "rollout_id": 3, "since": 1763...},
     "engines": {"phase": "generate", "rollout_id": 4, "since": 1763...}}

Trainer and engines have separate lanes, because with ``train_async.py`` they work at the same time. Times are seconds
since 1970. The driver writes the file and replaces it as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import psutil
import ray
from ray.exceptions import RayError

from slime.utils.async_utils import raise_if_interrupted
from slime.utils.files import replacing

PROGRESS = "progress.json"

Lane = Literal["trainer", "engines"]
_PHASES = {"generate": "generating", "eval": "evaluating", "train": "training", "save": "saving", "sync": "syncing"}
Phase = Literal["start", "generate", "eval", "train", "save", "sync", "idle"]


class Progress:
    """Writer of the file. A full or missing disk does not end the run, the file only becomes stale."""

    def __init__(self, directory: Path, **facts: Any) -> None:
        """
        Args:
            facts: constant for the whole run.
        """
        self._path = directory / PROGRESS
        self._lock = threading.Lock()  # with train_async.py a second thread generates
        self._content: dict[str, Any] = {}
        self._lines: dict[str, str] = {}
        begun = {**_process(), "started": time.time(), "restarts": self._num_restarts(), **facts, "state": "running"}
        self._write(begun | {lane: _entry("start", None) for lane in ("trainer", "engines")})

    def _num_restarts(self) -> int:
        """One more than in the file, if this process wrote it: then the run restarts in the same job."""
        try:
            before = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0
        is_ours = before.items() >= _process().items()
        return int(before.get("restarts", 0)) + 1 if is_ours else 0

    def update(self, **facts: Any) -> None:
        """Write new or changed facts."""
        with self._lock:
            self._write(facts)

    def lanes(self) -> list[dict[str, Any]]:
        """The phases of the engines and the trainer, with ``rollout_id`` and ``since``."""
        with self._lock:
            return [dict(self._content[lane]) for lane in ("engines", "trainer")]

    @contextmanager
    def phase(self, lane: Lane, name: Phase, rollout_id: int | None) -> Iterator[None]:
        """Set the phase of ``lane`` for the block. Afterwards the lane is idle."""
        self.update(**{lane: _entry(name, rollout_id)})
        yield  # without finally: after an error the file keeps the phase that failed
        self.update(**{lane: _entry("idle", rollout_id)})

    def _write(self, facts: dict[str, Any]) -> None:
        self._content |= facts
        # a line per fact: ``indent`` would use the slow encoder
        self._lines |= {name: f"{json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items()}
        with contextlib.suppress(OSError), replacing(self._path) as partial:
            partial.write_text("{" + ",\n ".join(self._lines.values()) + "}\n", encoding="utf-8")


class _HasProgress(Protocol):
    @property
    def progress(self) -> Progress: ...


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=_HasProgress)


def phase(lane: Lane, name: Phase) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R]]:
    """Decorate a run's method whose first argument is a rollout number: sets the phase while the method works."""

    def decorate(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
        @functools.wraps(method)
        def in_phase(run: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            raise_if_interrupted()
            rollout_id: Any = next(iter((*args, *kwargs.values())))
            with run.progress.phase(lane, name, rollout_id):
                return method(run, *args, **kwargs)

        return in_phase

    return decorate


def _process() -> dict[str, Any]:
    """This process: pid and start time, because in a container the pid is the same every time."""
    return {"pid": os.getpid(), "pid_since": psutil.Process().create_time()}


def _entry(name: Phase, rollout_id: int | None) -> dict[str, Any]:
    return {"phase": name, "rollout_id": rollout_id, "since": time.time()}


class CurrentPhases:
    """The phases of a run for the line in place: ``generating 9/16 groups``, without waiting for a process.

    Args:
        manager: the rollout manager, which counts groups and samples.
    """

    def __init__(self, progress: Progress, manager: Any) -> None:
        self._progress = progress
        self._manager = manager
        self._under_way: Any = None
        self._counted = ""

    def now(self) -> list[tuple[str, float]]:
        """Each phase with its seconds so far."""
        return [
            (_PHASES[entry["phase"]] + self._count(entry["phase"]), time.time() - entry["since"])
            for entry in self._progress.lanes()
            if entry["phase"] in _PHASES
        ]

    def _count(self, phase: str) -> str:
        if phase not in ("generate", "eval"):
            return ""
        try:
            if self._under_way is None:
                self._under_way = self._manager.under_way.remote()
            elif ray.wait([self._under_way], timeout=0)[0]:
                answer, self._under_way = self._under_way, None
                self._counted = f" {ray.get(answer)}".rstrip()
        except RayError:  # a dead manager ends the run elsewhere
            self._under_way = None
        return self._counted
