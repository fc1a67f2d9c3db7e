"""Runs a driver as a user does, and finds out whether anything of it survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.warm import MARK, Warm
from tests.limits import Limit, wait_for_exit

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = str(Path(__file__).with_name("plugin_functions.py"))
GIVEN = dict(os.environ)
"""The environment of all runs. Imports in the process of the tests change its own: SGLang sets folders of caches."""
warm: list[Warm] = []  # in the tests


@dataclass
class Finished:
    """A run that has ended.

    Attributes:
        output: every line of it once (:func:`everything`).
        terminal: the lines that a user sees.
        left: names in the temporary directory of the run.
    """

    status: int
    output: str
    mark: str
    terminal: str = ""
    left: list[str] = field(default_factory=list)

    def survivors(self, within_s: float = 10.0) -> list[str]:
        """Command lines of processes that still carry the run's mark after ``within_s`` seconds."""
        limit = Limit(within_s)
        while (left := marked_processes(self.mark)) and not limit.is_over:
            time.sleep(0.1)
        return left


def environment(mark: str = "0" * 32, **variables: str) -> dict[str, str]:
    """Of a run that starts quickly, if this process has warm processes."""
    own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | (warm[0].variables if warm else {})
    return GIVEN | own | {MARK: mark} | variables


def start_train(
    flags: list[Any], cwd: Path, log: Path, script: str = "train.py", **variables: str
) -> tuple[subprocess.Popen, str]:
    mark = uuid.uuid4().hex
    command = [sys.executable, str(ROOT / script), *map(str, flags)]
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment(mark, **variables), stdout=sink, stderr=subprocess.STDOUT
        )
    return process, mark


def run_train(flags: list[Any], cwd: Path, timeout_s: float = 240.0, script: str = "train.py") -> Finished:
    log, run_log = cwd / f"train-{uuid.uuid4().hex[:6]}.log", _run_log(flags, cwd)
    before = _state(run_log)
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # a short path, as sockets need
        process, mark = start_train(flags, cwd, log, script, TMPDIR=temporary)
        status = exit_status(process, log, timeout_s)
        left = os.listdir(temporary)
    return Finished(status, everything(log, run_log, before), mark, log.read_text(), left)


def slime(*words: Any) -> tuple[int, str]:
    """Status and output of the command ``slime``, which ends with the folders of its run."""
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        command = [sys.executable, "-m", "slime", *map(str, words)]
        done = subprocess.run(command, env=environment(TMPDIR=temporary), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def everything(terminal: Path, run_log: Path | None, before: tuple[int, int] = (0, 0)) -> str:
    """The full log of a run, and the lines of the terminal that are not in it.

    Args:
        before: inode and size before the run, which may continue the log of another one.
    """
    shown = terminal.read_text()
    if run_log is None or not run_log.exists():
        return shown
    lines = [line for line in shown.splitlines(keepends=True) if not line.startswith(("warning: ", "    "))]
    inode, size = before
    logged = run_log.read_bytes()[size if run_log.stat().st_ino == inode else 0 :].decode()
    return logged + "".join(lines)


def _state(run_log: Path | None) -> tuple[int, int]:
    if run_log is None or not run_log.exists():
        return 0, 0
    return run_log.stat().st_ino, run_log.stat().st_size


def _run_log(flags: list[Any], cwd: Path) -> Path | None:
    words = list(map(str, flags))
    if "--experiment-name" not in words:
        return None
    output = words[words.index("--output-dir") + 1] if "--output-dir" in words else "outputs"
    return cwd / output / words[words.index("--experiment-name") + 1] / "run.log"


def exit_status(process: subprocess.Popen, log: Path, timeout_s: float = 240.0) -> int:
    """Exit status of a run. A run that takes longer is killed, and the error has the end of its log."""
    status = wait_for_exit(process, timeout_s)
    if status is None:
        process.kill()
        raise AssertionError(f"{process.args[1]} did not end within {timeout_s} s:\n{log.read_text()[-4000:]}")
    return status


def marked_processes(mark: str) -> list[str]:
    return [command for _, command in marked(mark)]


def kill_marked(mark: str, name: str) -> int:
    """SIGKILL the run's processes whose command line contains ``name``. Returns how many there were."""
    chosen = [pid for pid, command in marked(mark) if name in command]
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)
    return len(chosen)


def marked(mark: str) -> list[tuple[int, str]]:
    """Pids and command lines of the run's processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z":
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
                    found.append((int(entry.name), command))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def values(records: list[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if name in record]
