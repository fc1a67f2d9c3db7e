"""Breaks a run from outside, at a chosen moment, and watches the result.

The moment is found in ``progress.json``, as a user would. It cannot distinguish two phases (rewards are
computed while responses are generated, and a batch is made in milliseconds). For these the run gets user functions that
take their time and leave a file (``lingering_functions``).
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

from slime.data.ledger import Entry, read_ledger
from tests.e2e.running import everything, marked, start_train
from tests.e2e.warm import COLD
from tests.limits import Limit

PROCESSES = {
    "trainer rank": "ray::TrainActor",
    "rollout manager": "ray::RolloutManager",
    "Data Buffer": "ray::DataBuffer",
    "engine": "sglang::sched",
    "router": "sglang_utils.router",
    "driver": "train.py",
}
"""Kind of process -> part of its command line."""

PHASES = ("generate", "reward", "convert", "train", "sync", "save", "eval")

_POLL_S = 0.003


@dataclass
class Broken:
    """A run under way.

    Attributes:
        output: folder that holds the run's folder ``run`` and, with ``--save``, its checkpoints.
    """

    process: Popen
    mark: str
    output: Path
    log: Path
    limit: Limit = field(default_factory=lambda: Limit(200.0))

    def text(self) -> str:
        return everything(self.log, self.output / "run" / "run.log")

    def wait(self, ready: Callable[[], Any]) -> Any:
        """Wait until ``ready`` returns a true value, and return it. The run must live until then."""
        while not (found := ready()):
            assert self.process.poll() is None, self.text()[-6000:]
            assert not self.limit.is_over, self.text()[-6000:]
            time.sleep(_POLL_S)
        return found

    def progress(self) -> dict[str, Any]:
        """Empty until this run has written some. Those of an earlier run in the folder do not count."""
        try:
            found = json.loads((self.output / "run" / "progress.json").read_text())
        except FileNotFoundError:
            return {}
        return found if found["pid"] == self.process.pid else {}

    def is_in(self, phase: str, rollout_id: int) -> bool:
        """Whether the run is in ``phase`` of that rollout, or of a later one."""
        if phase in ("reward", "convert"):
            path = self.output / "run" / f"in_{phase}"
            return path.exists() and int(path.read_text() or -1) >= rollout_id
        lanes = [self.progress().get(lane, {}) for lane in ("trainer", "engines")]
        return any(lane.get("phase") == phase and lane["rollout_id"] >= rollout_id for lane in lanes)

    def break_in(self, phase: str, rollout_id: int, what: str, how: signal.Signals = signal.SIGKILL) -> float:
        """Kill one process of kind ``what`` in that phase. Returns the time since 1970."""
        self.wait(lambda: self.is_in(phase, rollout_id))
        os.kill(min(self.pids(what)), how)  # the router has a child that watches its owner
        return time.time()

    def pids(self, what: str) -> list[int]:
        if what == "driver":
            return [self.process.pid]
        return [pid for pid, command in marked(self.mark) if PROCESSES[what] in command]

    def trained_after(self, killed_at: float) -> float:
        """Time at which the run had trained on a rollout that was made after ``killed_at``."""

        def found() -> float | None:
            made: set[int] = set()
            for entry in self._ledger(killed_at):
                match entry["event"]:
                    case "used":
                        made.add(entry["rollout"])
                    case "trained" if entry["rollout"] in made:
                        return entry["at"]
            return None

        return self.wait(found)

    def startup_s(self, killed_at: float) -> float:
        """Seconds that engines and trainer took to start again after ``killed_at``, or 0 if they did not restart."""
        begun = [entry["at"] for entry in self._ledger(killed_at) if entry["event"] == "begin"]
        return begun[-1] - self.progress()["started"] if begun else 0.0

    def engine_start_s(self) -> float:
        """Seconds from the death of an engine until its replacement served, as the log says of the latest one."""
        found = re.findall(r"serves again, ([\d.]+) s after", self.text())
        return float(found[-1]) if found else 0.0

    def _ledger(self, since: float) -> list[Entry]:
        ledger = Path(self.progress().get("ledger") or "none")
        entries = read_ledger(ledger)[0] if ledger.exists() else []  # the Data Buffer writes it later
        return [entry for entry in entries if entry["at"] > since]


@contextmanager
def broken(flags: list[Any], output: Path, script: str = "train.py") -> Iterator[Broken]:
    """Start a run. Its remaining processes are killed at the end."""
    log = output / f"log-{time.time():.0f}"
    process, mark = start_train(flags, output, log, script, **COLD)
    try:
        yield Broken(process, mark, output, log)
    finally:
        process.kill()


def shared_memory(mark: str) -> set[Path]:
    """Files in /dev/shm that processes of the run have mapped, Ray's object store not counted: it has no name."""
    found = set()
    for pid, _ in marked(mark):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line and not line.endswith("(deleted)"):
                found.add(Path("/dev/shm/" + line.partition("/dev/shm/")[2]))
    return found
