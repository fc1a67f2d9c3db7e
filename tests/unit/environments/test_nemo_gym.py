"""Resources servers of NeMo Gym: a server of this process with its routes, and those of an installed package."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from openai.types.responses import Response as OpenAIResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from slime.cli import main
from slime.doctor.environment_play import Played, Script, play
from slime.environments import load
from slime.utils.errors import ConfigError
from slime.utils.net import free_port
from tests.doc_commands import ROOT, commands_of_page
from tests.unit.environments.serving import serving

PYTHON = os.environ.get("NEMO_GYM_PYTHON", "")
"""Interpreter in which nemo-gym is installed."""
needs_package = pytest.mark.skipif(
    not PYTHON, reason="NEMO_GYM_PYTHON does not name the interpreter of an installation of nemo-gym (Python 3.12)"
)
SERVE = """
import importlib, sys
from unittest.mock import MagicMock
import uvicorn
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import ServerClient
name, port = sys.argv[1], int(sys.argv[2])
module = importlib.import_module(f"resources_servers.{name}.app")
(kind,) = (k for k in vars(module).values() if isinstance(k, type) and k.__module__ == module.__name__
           and issubclass(k, SimpleResourcesServer))
config = kind.model_fields["config"].annotation(host="127.0.0.1", port=port, entrypoint="app.py", name=name)
server = kind(config=config, server_client=MagicMock(spec=ServerClient))
app = server.setup_webserver()
server.setup_exception_middleware(app)
uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")
"""


def call_of(name: str, /, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": "", "tool_calls": [{"id": f"call_{name}", "type": "function", "function": function}]}


def row_of(first: int, second: int, initial: int) -> dict[str, Any]:
    """As in the package's example, and the right replies."""
    number = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    tools = {"increment_counter": number, "get_counter_value": {"type": "object", "properties": {}}}
    text = f"add {first} then add {second} then get the count"
    calls = [call_of("increment_counter", count=first), call_of("increment_counter", count=second)]
    offered = [
        {"type": "function", "name": name, "description": "", "parameters": schema, "strict": True}
        for name, schema in tools.items()
    ]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": text}], "tools": offered},
        "initial_count": initial,
        "expected_count": first + second + initial,
        "good": [*calls, call_of("get_counter_value"), str(first + second + initial)],
    }


ROWS = [row_of(1, 2, 3), row_of(4, 5, 6), row_of(7, 8, 9)]


class Counters:
    """The counters of the package's example, with its routes and its cookie.

    Attributes:
        verified: bodies of ``/verify``.
        released: lets an increment by 1000 end.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.released = threading.Event()
        handlers = (self.seed_session, self.increment_counter, self.get_counter_value, self.verify)
        self.app = Starlette(routes=[Route(f"/{f.__name__}", f, methods=["POST"]) for f in handlers])

    async def seed_session(self, request: Request) -> JSONResponse:
        body = await request.json()
        if "initial_count" not in body:
            return JSONResponse({"detail": "initial_count: Field required"}, 422)
        session = uuid4().hex
        self.counts[session] = body["initial_count"]
        answer = JSONResponse({})
        answer.set_cookie("Counters___counter", session, httponly=True)
        return answer

    async def increment_counter(self, request: Request) -> JSONResponse:
        count = (await request.json()).get("count")
        if not isinstance(count, int):
            return JSONResponse({"detail": "count: Input should be a valid integer"}, 422)
        if count < 0:
            return JSONResponse("ValueError('negative')", 500 if count == -1 else 503)
        if count == 1000:
            await asyncio.to_thread(self.released.wait, 60)
        self.counts[request.cookies["Counters___counter"]] += count
        return JSONResponse({"success": True})

    async def get_counter_value(self, request: Request) -> JSONResponse:
        return JSONResponse({"count": self.counts[request.cookies["Counters___counter"]]})

    async def verify(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.verified.append(body)
        reward = float(body["expected_count"] == self.counts[request.cookies["Counters___counter"]])
        return JSONResponse(body if body.get("is_ungraded") else body | {"reward": reward})


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def server(counters: Counters) -> Iterator[tuple[str, Callable[[], None]]]:
    """Its address, and the function that stops it."""
    with serving(counters.app) as (url, end):

        def stop() -> None:
            counters.released.set()
            end()

        yield url, stop
        counters.released.set()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rows of the page, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "counter.jsonl", *ROWS)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def played(rows: Path, url: str, *replies: Any, task: int = 0, **options: Any) -> Played:
    environment = load(f"nemo-gym:{rows}", url=url, **options)
    return asyncio.run(play(environment, environment.task(task), Script(replies), 60))


def results(episode: Played) -> list[str]:
    """What the policy read from its tools."""
    return [message["content"] for message in episode.requests[-1]["messages"] if message["role"] == "tool"]


def command(page: str, words: str, url: str) -> list[str]:
    """The arguments of the page's command that contains ``words``, with the address of the server."""
    [line] = [c.text for c in commands_of_page(ROOT / page) if words in c.text]
    return [word.replace("http://127.0.0.1:8500", url) for word in shlex.split(line)[1:]]


def test_an_episode_calls_tools_in_its_session_and_is_graded_with_all_of_its_replies(
    counters: Counters, server: tuple[str, Any], rows: Path
) -> None:
    environment = load(f"nemo-gym:{rows}", url=server[0], answer="expected_count")
    task = environment.task(1)
    assert (len(environment), task.answer, len(task.good or ())) == (3, "15", 4)
    assert task.prompt == [{"role": "user", "content": "add 4 then add 5 then get the count"}]
    episode = asyncio.run(play(environment, task, Script(task.good or ()), 60))
    assert (episode.error, episode.reward, episode.has_changed_task) == (None, 1.0, False)
    assert [tool["function"]["name"] for tool in episode.requests[0]["tools"]] == [
        "increment_counter",
        "get_counter_value",
    ]
    assert results(episode) == ['{"success":true}', '{"success":true}', '{"count":15}']
    [body] = counters.verified
    assert (body["expected_count"], "good" in body) == (15, False)
    assert [(item["type"], item.get("call_id")) for item in body["response"]["output"]] == [
        ("function_call", "call_increment_counter"),
        ("function_call_output", "call_increment_counter"),
        ("function_call", "call_increment_counter"),
        ("function_call_output", "call_increment_counter"),
        ("function_call", "call_get_counter_value"),
        ("function_call_output", "call_get_counter_value"),
        ("message", None),
    ]
    said = [item for item in body["response"]["output"] if item["type"] != "function_call_output"]
    assert OpenAIResponse.model_validate(body["response"] | {"output": said}).output_text == "15"


def test_episodes_at_once_do_not_share_a_session(server: tuple[str, Any], rows: Path) -> None:
    environment = load(f"nemo-gym:{rows}", url=f"{server[0]}/")  # as browsers show an address

    async def all_tasks() -> list[Any]:
        tasks = [environment.task(index % 3) for index in range(9)]
        return [one.reward for one in await asyncio.gather(*(play(environment, t, Script(t.good), 60) for t in tasks))]

    assert asyncio.run(all_tasks()) == [1.0] * 9


def test_wrong_calls_are_answered_and_other_routes_cannot_be_called(
    counters: Counters, server: tuple[str, Any], rows: Path
) -> None:
    calls = [call_of("increment_counter", count="x"), call_of("increment_counter", count=float("nan"))]
    calls += [call_of("increment_counter", count=-1), call_of("verify"), call_of("seed_session", initial_count=6)]
    episode = played(rows, server[0], *calls, "6")
    assert (episode.error, episode.reward) == (None, 0.0)
    wrong = '{"detail":"count: Input should be a valid integer"}'
    none = "there is no such tool; the tools are increment_counter, get_counter_value"
    assert results(episode) == [wrong, wrong, "\"ValueError('negative')\"", none, none]
    assert (len(counters.counts), len(counters.verified)) == (1, 1)


def test_the_episode_ends_and_is_graded_after_max_turns(
    counters: Counters, server: tuple[str, Any], rows: Path
) -> None:
    episode = played(rows, server[0], *ROWS[0]["good"], max_turns=2)
    assert (len(episode.requests), episode.reward) == (2, 1.0), "the counter is right, without a last reply"
    assert len(counters.verified[0]["response"]["output"]) == 4


def test_a_server_that_fails_is_silent_or_gone_fails_the_episode_with_route_status_and_fix(
    server: tuple[str, Any], rows: Path
) -> None:
    url, stop = server
    failed = [played(rows, url, call_of("increment_counter", count=-2))]
    failed.append(played(rows, url, call_of("increment_counter", count=1000), call_timeout=0.5))
    ungraded = write(rows.with_name("ungraded.jsonl"), ROWS[0] | {"is_ungraded": True})
    failed.append(played(ungraded, url, "6"))
    other = write(rows.with_name("other.jsonl"), {"responses_create_params": {"input": "hello"}})
    failed.append(played(other, url, "hello"))
    with serving(Starlette()) as (elsewhere, _):
        failed.append(played(rows, elsewhere, "6"))
    stop()
    failed.append(played(rows, url, "6"))
    assert [type(one.error) for one in failed] == [ConnectionError] * 6
    at, start = f"NeMo Gym server {url}: POST", "start the server, or give a longer call_timeout"
    texts = [str(one.error) for one in failed]
    assert texts[0].startswith(f'{at} /increment_counter: status 503: read the log of the server. Its answer: "Value')
    assert texts[1] == f"{at} /increment_counter: {start}: ReadTimeout"
    assert texts[2] == f"{at} /verify: no reward: 'reward'"
    assert texts[3].startswith(f"{at} /seed_session: status 422: give the rows of this server. Its answer: ")
    assert texts[4].startswith(
        f"NeMo Gym server {elsewhere}: POST /seed_session: status 404: start the resources server"
    )
    assert texts[5].startswith(f"{at} /seed_session: {start}: ")
    assert "connection" in texts[5]


def test_a_prompt_has_instructions_history_and_the_roles_of_chat_templates(tmp_path: Path) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'}
    items = [
        {"role": "developer", "content": "be exact"},
        {"role": "user", "content": [{"type": "input_text", "text": 'a row with the text "input_image"'}]},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "2"},
    ]
    path = write(tmp_path / "rows.jsonl", {"responses_create_params": {"instructions": "be short", "input": items}})
    task = load(f"nemo-gym:{path}", url="http://127.0.0.1:9", reward_range=[0, 2]).task(0)
    assert [message["role"] for message in task.prompt] == ["system", "system", "user", "assistant", "tool"]
    assert task.prompt[3]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert (task.answer, task.good) == (None, None)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "x"}, {}, r"rows.jsonl:2: a row of NeMo Gym has .*KeyError\('responses_create_params'\)"),
        ({"responses_create_params": {"input": 3}}, {}, "rows.jsonl:2: a row .*input must be a text or a list"),
        ({"responses_create_params": {"input": []}}, {}, "rows.jsonl:2: .*its input is empty or has images"),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}},
            {},
            "rows.jsonl:2: .*its input is empty or has images: give rows of texts",
        ),
        (ROWS[0], {"answer": "expected"}, r"rows.jsonl:1: .* field that answer names: KeyError\('expected'\)"),
    ],
)
def test_a_row_that_is_not_one_of_the_package_is_an_error_with_its_line(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS[0], row)
    with pytest.raises(ConfigError, match=message):
        load(f"nemo-gym:{path}", url="http://127.0.0.1:9", **options)


def test_a_missing_file_or_url_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*none\.jsonl"):
        load(f"nemo-gym:{tmp_path}/none.jsonl", url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="'url'"):
        load("nemo-gym:rows.jsonl")


def check_commands_of_the_page(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor finds no problem, and the tasks become rows that load the same tasks."""
    assert main([*command("docs/environments.md", "doctor env nemo-gym", url), "--tasks", "3"]) == 0
    report = capsys.readouterr().out
    assert "known-good replies  earn 1 in 3 tasks" in report
    assert "0 to look at, 0 failed" in report
    assert main(command("docs/environments.md", "tasks nemo-gym", url)) == 0
    drawn = [json.loads(line) for line in Path("train.jsonl").read_text("utf-8").splitlines()]
    assert [row["label"] for row in drawn] == ["6", "15", "24"]
    facts = drawn[2]["metadata"]
    assert load(facts["environment"], **facts["options"]).task(facts["task"]).prompt == drawn[2]["prompt"]


def test_a_server_passes_the_doctor_and_its_tasks_become_rows_with_the_commands_of_the_page(
    server: tuple[str, Any], rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_commands_of_the_page(server[0], capsys)


@contextmanager
def serving_package(name: str) -> Iterator[tuple[str, Path]]:
    """Address and example rows of a server of the installed package, which runs in its interpreter."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    place = "import nemo_gym; print(nemo_gym.PARENT_DIR)"
    found = subprocess.run([PYTHON, "-c", place], capture_output=True, text=True, check=True)
    with subprocess.Popen([PYTHON, "-c", SERVE, name, str(port)]) as process:
        try:
            deadline = time.monotonic() + 120
            while True:
                assert process.poll() is None, f"the server {name} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"the server {name} does not answer at {url}"
                try:
                    httpx.get(f"{url}/openapi.json").raise_for_status()
                    break
                except httpx.TransportError:
                    time.sleep(0.2)
            yield url, Path(found.stdout.strip(), "resources_servers", name, "data", "example.jsonl")
        finally:
            process.terminate()


@pytest.fixture
def packaged(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    with serving_package(request.param) as found:
        yield found


@needs_package
@pytest.mark.parametrize("packaged", ["example_session_state_mgmt"], indirect=True)
def test_a_server_of_the_package_passes_the_doctor_and_grades_its_own_rows(
    packaged: tuple[str, Path], rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, examples = packaged
    assert played(examples, url, *ROWS[1]["good"], task=1).reward == 1.0
    wrong = played(examples, url, call_of("increment_counter", count="x"), call_of("verify"), "6")
    assert (wrong.error, wrong.reward) == (None, 0.0)
    assert "Input should be a valid integer" in results(wrong)[0]
    other = write(rows.with_name("other.jsonl"), {"responses_create_params": {"input": "hello"}})
    unfit = str(played(other, url, "hello").error)
    assert unfit.startswith(f"NeMo Gym server {url}: POST /seed_session: status 422: give the rows of this server")
    check_commands_of_the_page(url, capsys)


@needs_package
@pytest.mark.parametrize("packaged", ["mcqa"], indirect=True)
def test_a_server_of_the_package_grades_replies_without_tools(packaged: tuple[str, Path]) -> None:
    url, examples = packaged
    environment = load(f"nemo-gym:{examples}", url=url, answer="expected_answer")
    answer = environment.task(0).answer
    assert played(examples, url, f"\\boxed{{{answer}}}").reward == 1.0
    assert played(examples, url, "I do not know.").reward == 0.0
