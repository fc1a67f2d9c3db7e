"""Environments of OpenEnv servers: replies as a field of the action, tools, and servers that fail."""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv", reason="pip install 'slime[openenv]'")

from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)

from examples.environments.counting_server import Counting, Reply, Told, app
from slime.cli import main
from slime.doctor.environment_play import Script, play
from slime.environments import load
from slime.utils.errors import ConfigError
from tests.doc_commands import ROOT, commands_of_page
from tests.unit.environments.serving import serving
from tests.unit.environments.test_adapters import call_of

TEXTS = {"action": "text", "observation": "text", "answer": "answers"}


class Codes(MCPEnvironment):
    """An MCP environment: looking up the code of the seed earns 1 and ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("codes")
        self.seed = 0

        @server.tool
        def look_up(name: str) -> str:
            """Find a code."""
            return f"code {name}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        self.seed = seed or 0
        return Told(text=f"find {seed}")

    async def step_async(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        observation = await super().step_async(action, timeout_s)
        if isinstance(action, CallToolAction) and action.arguments == {"name": str(self.seed)}:
            observation.reward, observation.done = 1.0, True
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


class Failing(Counting):
    """It is silent after "wait" until ``released``, and fails after "raise"."""

    released = threading.Event()

    def step(self, action: Reply, timeout_s: float | None = None, **_: Any) -> Told:
        if action.text == "raise":
            raise ValueError("the disk is full")
        if action.text == "wait":
            self.released.wait(60)
        return super().step(action, timeout_s)


class Unready(Counting):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        raise ValueError("the disk is full")


@pytest.fixture(scope="module")
def counting() -> Iterator[str]:
    with serving(app()) as (url, _):
        yield f"openenv:{url}"


def command(words: str, server: str) -> list[str]:
    """The arguments of the page's command that contains ``words``, with the address of ``server``."""
    [line] = [c.text for c in commands_of_page(ROOT / "docs/environments.md") if f"{words} openenv:http" in c.text]
    return [server if word.startswith("openenv:") else word for word in shlex.split(line)[1:]]


def test_an_environment_of_a_server_passes_the_doctor_with_the_command_of_the_page(
    counting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command("doctor env", counting)
    assert json.loads(words[words.index("--options") + 1]) == TEXTS
    assert main([*words, "--tasks", "3"]) == 0
    assert "known-good replies  earn 1 in 3 tasks" in capsys.readouterr().out


def test_the_tasks_of_a_server_become_rows_with_the_command_of_the_page(
    counting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = f"{counting}/"  # as browsers show an address
    words = command("tasks", server)
    assert main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "counting.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == int(words[words.index("--count") + 1]) == 100
    assert rows[7]["prompt"] == [{"role": "user", "content": "count from 17"}]
    assert rows[7]["metadata"] == {
        "environment": server,
        "options": {"action": "text", "observation": "text"},
        "task": 7,
    }
    drawn = rows[7]["metadata"]
    assert load(drawn["environment"], **drawn["options"]).task(drawn["task"]).prompt == rows[7]["prompt"]


def test_tasks_of_a_server_that_fails_or_has_no_such_answer_are_an_error(
    counting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--output", str(tmp_path / "rows.jsonl")]
    assert main(["tasks", counting, "--options", '{"answer": "solution"}', *place]) == 2
    told = capsys.readouterr().err
    assert "answer (of the state): 'solution' is not one of its fields " in told
    assert f"url='{counting.removeprefix('openenv:')}'" in told
    with serving(create_fastapi_app(Unready, Reply, Told, 8)) as (url, _):
        assert main(["tasks", f"openenv:{url}", *place]) == 2
    assert f"error: OpenEnv server {url}: Server error: the disk is full" in capsys.readouterr().err


def test_replies_are_a_field_of_the_action_and_rewards_of_the_turns_are_added(counting: str) -> None:
    environment = load(counting, **TEXTS)
    task = environment.task(3)
    assert (task.prompt, task.answer, task.good) == ([{"role": "user", "content": "count from 13"}], "15", ("14", "15"))
    full, half, none = (asyncio.run(play(environment, task, Script(s), 60)) for s in (task.good, ["14", "1"], ["x"]))
    assert [one.reward for one in (full, half, none)] == [1.0, 0.5, 0.0]
    assert [len(one.requests) for one in (full, half, none)] == [2, 2, 1]
    assert [m["content"] for m in full.requests[1]["messages"]] == ["count from 13", "14", "next"]


def test_without_a_field_the_action_is_a_tool_and_a_wrong_call_is_answered_with_its_error(counting: str) -> None:
    environment = load(counting, max_turns=4)
    assert environment.task(3).prompt[0]["content"] == '{"text": "count from 13"}'
    script = Script([call_of("step", number="14"), call_of("step", text="14"), call_of("step", text="15")])
    played = asyncio.run(play(environment, environment.task(3), script, 60))
    assert (played.reward, len(played.requests)) == (1.0, 3)
    (tool,) = played.requests[0]["tools"]
    assert (tool["function"]["name"], list(tool["function"]["parameters"]["properties"])) == ("step", ["text"])
    wrong, right = (message["content"] for message in played.requests[2]["messages"] if message["role"] == "tool")
    assert "does not have the fields" in wrong
    assert right == '{"text": "next"}'


def test_the_policy_gets_the_tools_of_an_mcp_environment() -> None:
    with serving(create_fastapi_app(Codes, CallToolAction, CallToolObservation, 8)) as (url, _):
        environment = load(f"openenv:{url}", size=9)
        script = Script([call_of("no_such"), call_of("look_up", name="1"), call_of("look_up", name="7"), "too late"])
        played = asyncio.run(play(environment, environment.task(7), script, 60))
    assert (len(environment), played.reward, len(played.requests)) == (9, 1.0, 3)
    (tool,) = played.requests[0]["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("look_up", "Find a code.")
    wrong, other = (message["content"] for message in played.requests[2]["messages"] if message["role"] == "tool")
    assert wrong == "there is no such tool; the tools are look_up"
    assert "code 1" in other


def test_a_server_that_is_silent_fails_or_is_gone_fails_the_episode_with_its_address() -> None:
    with serving(create_fastapi_app(Failing, Reply, Told, 8)) as (url, stop):
        environment = load(f"openenv:{url}", action="text")
        task = environment.task(0)
        errors = [asyncio.run(play(environment, task, Script(["raise"]), 60)).error]
        environment.call_timeout = 0.5
        errors.append(asyncio.run(play(environment, task, Script(["wait"]), 60)).error)
        Failing.released.set()
        stop()
        errors.append(asyncio.run(play(environment, task, Script(["1"]), 60)).error)
    assert [type(error) for error in errors] == [ConnectionError] * 3
    assert str(errors[0]).startswith(f"OpenEnv server {url}: Server error: the disk is full")
    assert str(errors[1]) == f"OpenEnv server {url}: TimeoutError"
    assert "Failed to connect" in str(errors[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "txt"}, "action: 'txt' is not one of its fields text"),
        ({"observation": "x"}, "observation: 'x' is not one of its fields .*text"),
    ],
)
def test_a_wrong_field_is_an_error_with_the_known_ones(counting: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(counting, **options).task(0)


def test_an_address_without_a_server_is_an_error_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "env", "openenv:http://127.0.0.1:9"]) == 2
    assert "error: openenv:http://127.0.0.1:9: this address is not an OpenEnv server: " in capsys.readouterr().err
