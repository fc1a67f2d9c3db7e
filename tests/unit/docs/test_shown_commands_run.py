"""Commands of the pages that a small machine can execute are executed, block by block, as a reader would type them.

Their models, data and runs are made beforehand (``readers_place``). A command that serves until it is stopped is asked
for its page and stopped.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.cli import main
from slime.utils import async_utils
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.net import free_port
from tests.doc_commands import ROOT, census
from tests.programs import put_python_in
from tests.unit.docs.readers_place import add_missing_flags, in_place, prepare
from tools.make_tiny_task import TinyTask

SERVERS = re.compile(r"slime board|tensorboard |python tools/trace_timeline_viewer\.py (?!.*--no-serve)")

OF_OTHERS = (
    "PYTEST",
    "RANK",
    "WORLD_SIZE",
    "SLIME_CONTRACT",
    "SLIME_DRY_RUN",
    "MODEL_DIR",
    "DATA_DIR",
    "HF_CHECKPOINT",
)
"""Environment variables of the user who runs the tests."""


def blocks_to_run() -> Iterator[tuple[str, list[str]]]:
    """(page and number of the block, its commands that are executed here). Of equal blocks, the first."""
    found: dict[tuple[str, int], list[str]] = {}
    for command, executed in census().items():
        if executed == "here":
            found.setdefault((command.page, command.block), []).append(command.text)
    first = {tuple(texts): key for key, texts in reversed(found.items())}
    yield from ((f"{page}-{block}", list(texts)) for texts, (page, block) in reversed(first.items()))


BLOCKS = dict(blocks_to_run())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder in which ``slime`` is a command, also if the package was not installed by pip."""
    program = tmp_path / "bin" / "slime"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nexec python -m slime "$@"\n')
    program.chmod(0o755)
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_OTHERS)}
    path = f"{place / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return kept | {"PATH": path, "BASE_DIR": str(place), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def typed(command: str, place: Path) -> str:
    """The command for the shell: its paths in the folder, ``...`` filled in."""
    command = in_place(command, place)
    if " ..." in command:
        command = shlex.join(add_missing_flags(shlex.split(command)))
    return command


def is_report(command: str, output: str) -> bool:
    """Did a doctor do its work, and find nothing wrong with the command, but something to repair on this machine?"""
    is_whole = re.search(r"^\d+ ok, .*\d+ failed$", output, re.MULTILINE) is not None
    return command.startswith("slime doctor") and is_whole and not re.search(r"^FAIL +--", output, re.MULTILINE)


def run(commands: list[str], place: Path) -> None:
    """One shell for all, so that variables last. The shell's trace shows which command failed."""
    script = "\n".join(typed(command, place) for command in commands)
    log = place / "shell.log"
    put_python_in(place / "bin")
    with log.open("w") as file, open(os.devnull) as null:
        command = ["bash", "-euxc", script]
        shell = subprocess.run(
            command, cwd=place, env=environment(place), stdin=null, stdout=file, stderr=file, check=False
        )
    output = log.read_text()
    assert shell.returncode == 0 or is_report(commands[-1], output), output[-6000:]


def serve(command: str, place: Path) -> None:
    """A server answers, and ends when it is interrupted."""
    port = free_port()
    words = [*shlex.split(typed(command, place)), "--port", str(port)]
    with (place / "server.log").open("w") as log:
        process = subprocess.Popen(
            words,
            cwd=place,
            env=environment(place),
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background job
        )
    try:
        wait_until(lambda: process.poll() is not None or answers(port), Deadline(600, command))
        assert process.poll() is None, (place / "server.log").read_text()
        process.send_signal(signal.SIGINT)
        process.wait()
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_commands_runs_as_it_stands(block: str, place: Path, tiny_task: TinyTask) -> None:
    commands = BLOCKS[block]
    prepare(place, commands, tiny_task)
    servers = [command for command in commands if SERVERS.match(command)]
    for command in servers:
        serve(command, place)
    if others := [command for command in commands if command not in servers]:
        run(others, place)


def test_a_command_that_fails_is_found(place: Path, tiny_task: TinyTask) -> None:
    prepare(place, [], tiny_task)
    with pytest.raises(AssertionError, match="is not a command of slime"):
        run(["slime bord", "true"], place)
    with pytest.raises(AssertionError, match="invalid int value"):
        run(["slime plan train.py ... --num-rollout three"], place)


def test_a_program_does_not_wait_for_a_thread_that_its_fork_lacks(place: Path, tiny_task: TinyTask) -> None:
    async_utils.run(asyncio.sleep(0))  # begins the thread of this process
    prepare(place, [], tiny_task)
    run(["python -m slime.testing --custom-rm-path my_reward.py:reward_func"], place)


def test_installing_the_package_makes_slime_a_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"slime": f"{main.__module__}:{main.__name__}"}
