"""Task folders of Harbor, played in a process on this machine whose root is a temporary folder."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples.coding_agent_rl.local_sandbox import LocalSandbox
from slime.agent import sandbox
from slime.agent.docker_sandbox import _build, built_image
from slime.agent.sandbox import ExecResult, FileContent
from slime.doctor.environment_play import Script, play
from slime.environments import load
from slime.utils.errors import ConfigError

TEST = """#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
grep -qx "$WANTED" app/answer.txt && cp /tests/data/right.txt /logs/verifier/reward.txt
"""


class Rooted(LocalSandbox):
    """Absolute paths of Harbor, and those of :func:`sandbox.exec_and_wait`, are below the folder of the sandbox."""

    def _mapped(self, text: str) -> str:
        for name in ("tests", "logs", "tmp/.harbor"):
            text = text.replace(f"/{name}", f"{self.root}/{name}")
        return text

    async def _exec(self, cmd: str, **values: Any) -> ExecResult:
        (self.root / "tmp").mkdir(exist_ok=True)
        return await super()._exec(self._mapped(cmd), **values)

    async def write_file(self, path: str, content: FileContent, *, user: str = "root") -> None:
        text = content.read_text() if isinstance(content, Path) else str(content)
        await super().write_file(self._mapped(path), self._mapped(text))

    async def read_file(self, path: str, *, user: str = "root") -> str:
        return await super().read_file(self._mapped(path))


def call_of(command: str) -> dict[str, Any]:
    function = {"name": "run", "arguments": json.dumps({"command": command})}
    return {"content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sandbox, "_POLL_S", 0.1)
    place = tmp_path / "tasks" / "write-42"
    (place / "tests" / "data").mkdir(parents=True)
    (tmp_path / "image" / "app").mkdir(parents=True)
    (place / "task.toml").write_text(
        'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[agent]\ntimeout_sec = 60.0\n'
        '[verifier]\ntimeout_sec = 30.0\nenv = {WANTED = "42"}\n'
        f'[environment]\ndocker_image = "{tmp_path / "image"}"\nbuild_timeout_sec = 600.0\n'
    )
    (place / "instruction.md").write_text("Write 42 to app/answer.txt.\n")
    (place / "tests" / "test.sh").write_text(TEST)
    (place / "tests" / "data" / "right.txt").write_text("0.75\n")
    return place


def reward(folder: Path, *replies: Any, **options: Any) -> Any:
    environment = load(f"harbor:{folder}", sandbox=f"{__name__}:Rooted", **options)
    played = asyncio.run(play(environment, environment.task(0), Script(replies), 60))
    return played if played.error else played.reward


def test_a_task_folder_is_solved_with_commands_and_graded_by_its_tests(folder: Path) -> None:
    environment = load(f"harbor:{folder.parent}", sandbox=f"{__name__}:Rooted")
    assert len(environment) == len(load(f"harbor:{folder}")) == 1
    task = environment.task(0)
    assert task.prompt == [{"role": "user", "content": "Write 42 to app/answer.txt.\n"}]
    script = Script([call_of("ls app; echo 42 > app/answer.txt; exit 3"), "done"])
    played = asyncio.run(play(environment, task, script, 60))
    assert (played.error, played.reward) == (None, 0.75), "the number that the tests wrote"
    first, second = played.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["run"]
    assert second["messages"][-1]["content"] == "exit code 3\n", "the tests are not there yet"


def test_wrong_states_wrong_calls_and_slow_commands_earn_what_the_tests_say(folder: Path) -> None:
    assert reward(folder, "I cannot.") == 0.0
    other = {"id": "1", "type": "function", "function": {"name": "x", "arguments": "[]"}}
    right = call_of("echo 42 > app/answer.txt")
    assert (
        reward(folder, {"content": "", "tool_calls": [other]}, call_of("sleep 60"), right, "", command_timeout=5)
        == 0.75
    )
    planted = call_of("mkdir -p /logs/verifier tests; echo 1 > /logs/verifier/reward.txt; echo > /tests/test.sh")
    assert reward(folder, planted, "") == 0.0
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("timeout_sec = 60.0", "timeout_sec = 1.0"))
    assert reward(folder, right, call_of("sleep 60"), "") == 0.75, "the episode ends, and its state is graded"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("""echo '{"reward": 0.5, "tests": 3}' > /logs/verifier/reward.json""", 0.5),
        ("""echo '{"accuracy": 0.25}' > /logs/verifier/reward.json""", 0.25),
        ("""echo '{"reward": 1}' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt""", 0.0),
        ("exit 4", "ended with 4 .* no reward.txt and no reward.json"),
        ("echo nothing > /logs/verifier/reward.txt", "nothing"),
        ("""echo '{"a": 1, "b": 2}' > /logs/verifier/reward.json""", '"b": 2'),
    ],
)
def test_the_reward_is_the_number_of_the_file_that_the_tests_write(folder: Path, script: str, found: Any) -> None:
    (folder / "tests" / "test.sh").write_text(script)
    result = reward(folder, "")
    if isinstance(found, float):
        assert result == found
    else:
        assert isinstance(result.error, ValueError)
        with pytest.raises(ValueError, match=found):
            raise result.error


def test_an_image_is_built_from_the_dockerfile_and_its_absence_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no task\.toml"):
        load(f"harbor:{tmp_path / 'image'}")
    place = folder / "environment"
    with pytest.raises(ConfigError, match=f"{place}: there is no Dockerfile in it, and no other image is named"):
        built_image(place, 60)
    place.mkdir()
    (place / "Dockerfile").write_text("FROM debian\n")
    program = tmp_path / "podman"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "build --quiet" ] && [ -f "$3/Dockerfile" ] && echo sha256:12\n')
    program.chmod(0o755)
    assert built_image(place, 60, str(program)) == "sha256:12"
    program.write_text("#!/bin/sh\necho no space >&2; exit 5\n")
    _build.cache_clear()
    with pytest.raises(ConfigError, match="build ended with 5: no space"):
        built_image(place, 60, str(program))


def test_episodes_that_start_at_once_build_their_image_once_within_the_limit_of_the_task(
    folder: Path, tmp_path: Path
) -> None:
    place = folder / "environment"
    place.mkdir()
    (place / "Dockerfile").write_text("FROM debian\n")
    program = tmp_path / "podman"
    program.write_text(f"#!/bin/sh\necho x >> {tmp_path}/builds; sleep 0.5; echo sha256:12\n")
    program.chmod(0o755)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: built_image(place, 60, str(program)), range(4))) == ["sha256:12"] * 4
    assert (tmp_path / "builds").read_text() == "x\n"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ConfigError, match=r"build took more than its limit of 0.2 s"):
        built_image(place, 0.2, str(program))


class Lost(Rooted):
    async def exec(self, cmd: str, **values: Any) -> ExecResult:
        if cmd == "lose":
            raise TimeoutError("the host of the sandbox does not answer")
        return await super().exec(cmd, **values)


def test_a_sandbox_that_is_lost_fails_the_episode_and_is_not_graded(folder: Path) -> None:
    environment = load(f"harbor:{folder}", sandbox=f"{__name__}:Lost")
    played = asyncio.run(play(environment, environment.task(0), Script([call_of("lose"), ""]), 60))
    assert isinstance(played.error, TimeoutError)
