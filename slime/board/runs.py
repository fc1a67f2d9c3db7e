"""The runs in a folder: their list, and the state of each one. Called by ``server``."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from slime.board.run_data import RunData
from slime.observability.run_info import FILE
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

# A search for new runs reads many folders, possibly on a network disk.
_SEARCH_EVERY_S = 10.0
# The last records of a run: enough for the seconds of a rollout. A whole file may have 100 MB.
_TAIL_BYTES = 2**17
# A run without progress.json counts as ended if it had no new record for this time.
_LIVE_S = 120.0


class Runs:
    """The run of a folder, or the runs up to two levels below it. New runs appear while the board works.

    Raises:
        DataError: there is no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._runs: dict[str, RunData] = {}
        self._searched = -_SEARCH_EVERY_S
        if not self._found():
            raise DataError(
                f"{folder} is not the folder of a run and has no runs: there is no {FILE} in it or up to two levels "
                "below it; name <output-dir> or <output-dir>/<experiment>."
            )

    def get(self, name: str) -> RunData:
        """The run of a name in the list. An empty name is the newest run.

        Raises:
            DataError: there is no such run.
        """
        runs = self._found()
        if not name:
            return max(runs.values(), key=lambda data: data.info.started)
        # Only names of the list: a path in a request must not reach other files.
        if name not in runs:
            raise DataError(f"run={name[:100]}: there is no such run in {self.folder}")
        return runs[name]

    def summaries(self) -> list[dict[str, Any]]:
        """State, progress and last values of every run, the newest run first. The page asks every 3 seconds."""
        found = [{"name": name, **summary(data)} for name, data in self._found().items()]
        return sorted(found, key=lambda run: -run["started"])

    def _found(self) -> dict[str, RunData]:
        with self._lock:
            if time.monotonic() - self._searched >= _SEARCH_EVERY_S:
                self._runs = self._search()
                self._searched = time.monotonic()
            return self._runs

    def _search(self) -> dict[str, RunData]:
        is_run = (self.folder / FILE).is_file()
        # <run>/earlier_<time> has the files of an earlier run of the same name.
        patterns = (FILE, f"*/{FILE}") if is_run else (f"*/{FILE}", f"*/*/{FILE}")
        found = {}
        for path in (path.parent for pattern in patterns for path in self.folder.glob(pattern)):
            name = path.relative_to(self.folder.parent if is_run else self.folder).as_posix()
            known = self._runs.get(name)
            try:
                found[name] = known if known is not None and known.is_current() else RunData(path)
            except DataError as error:
                if path == self.folder:
                    raise
                logger.warning("%s", error)
        return found


def summary(data: RunData) -> dict[str, Any]:
    """State of a run: rollouts done and wanted, seconds left, last reward and evaluation, seconds since a change."""
    progress = _progress(data.run / "progress.json")
    file = data.run / "metrics.jsonl"
    records = _tail(file, file.stat().st_size) if file.is_file() else []
    rollouts = [record for record in records if record["step_key"] == "rollout/step"]
    evals = [record for record in records if record["step_key"] == "eval/step"]
    lanes = [progress[lane] for lane in ("trainer", "engines") if lane in progress]
    times = [data.info.started, *(item["since"] for item in lanes), *(item.get("time", 0.0) for item in records[-1:])]
    state = _state(progress, data.info.host, time.time() - max(times))
    done = int(rollouts[-1]["rollout/step"]) + 1 if rollouts else progress.get("first_rollout", 0)
    # The median: the first rollout after a restart comes late.
    pauses = [b.get("time", 0.0) - a.get("time", 0.0) for a, b in itertools.pairwise(rollouts)]
    left_s = None
    if state == "running" and pauses and "num_rollout" in progress:
        left_s = max(0, progress["num_rollout"] - done) * statistics.median(pauses)
    return {
        "state": state,
        "phase": next((item["phase"] for item in lanes if item["phase"] != "idle"), None),
        "done": done,
        "num_rollout": progress.get("num_rollout"),
        "left_s": left_s,
        "started": data.info.started,
        "changed": max(times),
        "age_s": max(0.0, time.time() - max(times)),
        "reward": rollouts[-1].get("rollout/raw_reward") if rollouts else None,
        "evals": {name: value for name, value in (evals[-1] if evals else {}).items() if name.count("/") == 1},
        # After a change the page loads curves and samples again.
        "version": data.version(),
    }


@functools.lru_cache(maxsize=1024)
def _tail(path: Path, size: int) -> list[dict[str, Any]]:
    """The last complete records of a metrics file of ``size`` bytes."""
    first = max(0, size - _TAIL_BYTES)
    with path.open("rb") as file:
        file.seek(first)
        lines = file.read(size - first).splitlines()
    records = []
    for line in lines[1:] if first else lines:
        try:
            record = json.loads(line)
            records.append(record | {record["step_key"]: float(record[record["step_key"]])})
        except (ValueError, TypeError, KeyError):
            continue  # a line that is being written, or was cut by a crash
    return records


def _progress(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(progress: dict[str, Any], host: str, age_s: float) -> str:
    """The state in ``progress.json``, killed if that process is gone; without the file running or ended."""
    state = str(progress.get("state", "running" if age_s < _LIVE_S else "ended"))
    if state == "running" and "pid" in progress and host == socket.gethostname():
        try:
            # The number may belong to another process by now.
            lives = abs(psutil.Process(progress["pid"]).create_time() - progress["pid_since"]) < 2
        except psutil.Error:
            lives = False
        return "running" if lives else "killed"
    return state
