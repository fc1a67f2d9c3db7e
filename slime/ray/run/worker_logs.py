"""The output of a run's actors, for ``run.log`` and the terminal.

embedded cluster   the files of the session, all on this host: read until the cluster has ended, so nothing is lost
existing cluster   Ray's log monitors send the lines of all nodes to the driver. Lines of the last second may be
                   missing, but are in the session folder of their node
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray._private.ray_logging import global_worker_stdstream_dispatcher as ray_lines

from slime.observability.logging_utils import RUN_LOG
from slime.observability.terminal import TERMINAL

_FILES = ("worker-*.out", "worker-*.err", "raylet.err", "gcs_server.err")
_PID = re.compile(r"-(\d+)\.(?:out|err)$")
_LOOK_EVERY_S = 0.2
_MOST_BYTES = 1 << 22  # of one file at once
_DRAIN_S = 1.0
_RAYS_HANDLER = "ray_print_logs"
_PROCESSES_OF_RAY = ("raylet", "gcs_server")
# Lines by which Ray marks the owner of the lines that follow.
_ACTOR = ":actor_name:"
_MARKS = (_ACTOR, ":task_name:", ":job_id:")


@dataclass
class _File:
    """A log up to ``position``. ``rest``: the begin of a line whose end is not written yet."""

    path: Path
    name: str
    position: int = 0
    rest: bytes = b""

    def new_lines(self, *, is_over: bool) -> list[str]:
        """The lines since the last call. ``is_over``: also the last one without a line end."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                data = file.read(_MOST_BYTES)
        except OSError:  # deleted with its folder
            data = b""
        self.position += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if is_over and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        return [line.decode("utf-8", errors="replace") for line in lines]


class WorkerLogs:
    """Follows the logs of one folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, _File] = {}

    def look(self, *, is_over: bool = False) -> None:
        """Pass the new lines on."""
        for pattern in _FILES:
            for path in sorted(self._directory.glob(pattern)):
                file = self._files.setdefault(path, _File(path, path.stem))
                while lines := file.new_lines(is_over=is_over):
                    self._pass_on(file, lines)

    def _pass_on(self, file: _File, lines: list[str]) -> None:
        pid = _PID.search(file.path.name)
        for line in lines:
            if line.startswith(_ACTOR):
                file.name = line.removeprefix(_ACTOR).strip()
        texts = [line for line in lines if not line.startswith(_MARKS)]
        name = f"{file.name} {pid[1]}" if pid and not file.name.startswith("worker-") else file.name
        RUN_LOG.from_actor(name, texts, is_error=file.path.suffix == ".err")


@contextmanager
def followed(directory: Path) -> Iterator[None]:
    """Follow the logs of an embedded cluster inside the block, and to their ends after it."""
    logs, ended = WorkerLogs(directory), threading.Event()

    def follow() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            logs.look()

    thread = threading.Thread(target=follow, name="slime-worker-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        logs.look(is_over=True)


@contextmanager
def received() -> Iterator[None]:
    """Take the lines that Ray sends to the driver inside the block, instead of Ray's own printing."""
    replaced = [pair for pair in ray_lines.handlers if pair[0] == _RAYS_HANDLER]
    ray_lines.remove_handler(_RAYS_HANDLER)
    ray_lines.add_handler("slime", _receive)
    try:
        yield
        time.sleep(_DRAIN_S)  # the monitors read the files a few times in a second
    finally:
        ray_lines.remove_handler("slime")
        for pair in replaced:
            ray_lines.add_handler(*pair)


def _receive(batch: dict[str, Any]) -> None:
    pid, lines = batch.get("pid"), batch["lines"]
    if pid == "autoscaler":  # the state of the cluster every few seconds. A run names the resource that it lacks
        return
    if pid in _PROCESSES_OF_RAY:  # a node that runs out of memory or disk, and the like
        RUN_LOG.write(f"[{pid}] {line}" for line in lines)
        for line in lines:
            TERMINAL.line(f"warning: {pid}: {line}", is_error=True)
        return
    name = batch.get("actor_name") or batch.get("task_name") or "worker"
    RUN_LOG.from_actor(f"{name} {pid} on {batch.get('ip')}", lines, is_error=batch["is_err"])
