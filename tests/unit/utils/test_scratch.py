"""The folder of a run's temporary files, and what ``slime clean`` deletes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from slime.utils.files import LOCK, PREFIX, clean, left_folders, scratch_folder
from slime.utils.process import temporary_base
from tests.limits import Limit

HOLD = """
import sys, tempfile, time
from slime.utils.reaper import start_reaper
from slime.utils.files import scratch_folder
with scratch_folder() as folder:
    start_reaper(folder) if sys.argv[1] == "reaped" else None
    tempfile.NamedTemporaryFile(delete=False)
    print(folder, flush=True)
    time.sleep(100)
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory with a short path."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it when it compiles
    with tempfile.TemporaryDirectory(prefix="slime-test-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr("slime.utils.process.SHORTEST_BASE", Path(folder))
        yield Path(folder)


def holder(kind: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_temporary_files_of_the_block_and_its_children_are_in_one_folder(place: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == place
        assert Path(tempfile.mkdtemp()).parent == folder
        child = "import tempfile; print(tempfile.mkdtemp())"
        made = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
        assert Path(made.strip()).parent == folder
        assert "torchinductor" not in os.listdir(folder)
        assert not os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(folder)), "later runs need compiled kernels"
    assert list(place.iterdir()) == []
    assert os.environ["TMPDIR"] == str(place) == tempfile.gettempdir()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_path_that_is_too_long_for_sockets_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/scratch/" + "x" * 60)
    assert temporary_base() == Path("/tmp")
    monkeypatch.setenv("RAY_TMPDIR", "/scratch")
    assert temporary_base() == Path("/scratch")


def test_the_reaper_deletes_the_folder_of_a_killed_run(place: Path) -> None:
    process, folder = holder("reaped")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    limit = Limit(20)
    while folder.exists() and not limit.is_over:
        time.sleep(0.05)
    assert not folder.exists()


def test_clean_deletes_folders_of_dead_runs_only(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / f"{PREFIX}foreign").mkdir()  # without a lock: no run made it
    (place / f"{PREFIX}link").symlink_to(place / f"{PREFIX}foreign")
    alive, in_use = holder("alone")
    dead, left = holder("alone")
    try:
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        assert {one.path: one.used_by for one in left_folders()} == {in_use: "its run is alive", left: None}
        assert clean(["--dry-run"]) == 0
        assert left.exists()
        assert clean([]) == 0
        assert not left.exists()
        assert (in_use / LOCK).exists()
        lines = capsys.readouterr().out.splitlines()
        assert sorted(line.split()[0] for line in lines) == ["deleted", "found", "kept", "kept"]
        assert (place / f"{PREFIX}foreign").is_dir()
    finally:
        alive.kill()
        alive.wait()


@pytest.mark.parametrize("inside", [".", "slime-process-x"])
def test_clean_keeps_a_folder_that_processes_of_a_dead_driver_still_use(place: Path, inside: str) -> None:
    dead, left = holder("alone")
    os.kill(dead.pid, signal.SIGKILL)
    dead.wait()
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"], env={"TMPDIR": str(left / inside)}
    )
    try:
        (folder,) = left_folders()
        assert folder.used_by == f"its processes are alive: {orphan.pid}"
        assert clean([]) == 0
        assert left.exists()
    finally:
        orphan.kill()
        orphan.wait()
    assert clean([]) == 0
    assert not left.exists()
