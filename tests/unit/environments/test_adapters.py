"""Environments of packages, without an engine: every one passes the doctor, and errors name the fix."""

from __future__ import annotations

import ast
import asyncio
import json
import signal
import sys
import threading
from argparse import Namespace
from pathlib import Path

import httpx
import psutil
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from slime.agent.service import run_app_in_thread
from slime.cli import main
from slime.data.rows import read_file
from slime.data.sample import Sample
from slime.doctor.environment_command import findings_of
from slime.doctor.environment_play import Script, play
from slime.environments import ADAPTERS, Adapter, Model, Task, load, rollout
from slime.environments.rollout import generate
from slime.utils.errors import ConfigError, DataError
from tests.unit.environments.serving import serving

for package in ("reasoning_gym", "verifiers", "mcp"):
    pytest.importorskip(package, reason=f"pip install 'slime[{package.replace('_', '-')}]'")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "environments"
CODES = {"amber": "4711", "basil": "1234", "cedar": "9876", "mint": "5555"}


def call_of(name: str, /, **arguments: str) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.fixture
def codes(tmp_path):
    """(name, options) of an environment with the example's MCP server."""
    rows = ({"prompt": f"code of {n}?", "label": c, "good": [call_of("look_up", name=n), c]} for n, c in CODES.items())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "codes.json").write_text(json.dumps(CODES))
    command = [sys.executable, str(EXAMPLE / "codes_server.py"), str(tmp_path / "codes.json")]
    return f"mcp:{tmp_path / 'rows.jsonl'}", {"command": command}


HUB = "verifiers:examples.environments.tiny_sums"


def problems(name: str, tasks: int = 4, **options: object) -> dict[str, str]:
    """Findings of the doctor that are not ok."""
    wanted = Namespace(name=name, options=options, tasks=tasks, timeout=120.0, max_turn_tokens=8192, hf_checkpoint=None)
    found, _ = findings_of(wanted)
    assert {"prompts", "tasks repeat", "reward", "known-good replies", "isolation", "tokens"} <= {f.what for f in found}
    return {finding.what: finding.value for finding in found if finding.status != "ok"}


def test_a_generator_of_reasoning_gym_passes_the_doctor():
    assert problems("reasoning-gym:countdown") == {}  # chain_sum: by the command of docs/environments.md


def test_reasoning_gym_draws_the_same_tasks_without_a_seed_and_grades_the_bare_answer_without_a_system_prompt():
    one, two = (load("reasoning-gym:chain_sum", system_prompt="", max_terms=2, size=5) for _ in range(2))
    task = one.task(3)
    assert task == two.task(3)
    assert len(one) == 5
    assert [message["role"] for message in task.prompt] == ["user"]
    assert asyncio.run(play(one, task, Script([f" {task.answer}\n"]), 60)).reward == 1.0
    assert asyncio.run(play(one, task, Script([f"<answer>{task.answer}</answer>"]), 60)).reward < 1.0


def test_an_environment_of_the_verifiers_hub_passes_the_doctor():
    found = problems(HUB, tasks=3, seed=1)
    assert set(found) <= {"tasks differ"}


def test_verifiers_scores_an_empty_reply_and_raises_failures_of_the_engine():
    environment = load(HUB)
    task = environment.task(0)
    assert asyncio.run(play(environment, task, Script([""]), 60)).reward == 0.0
    failed = asyncio.run(play(environment, task, Script([""], fails=True), 60))
    assert "ModelError" in type(failed.error).__name__


def test_tools_of_a_verifiers_environment_are_offered_and_run():
    environment = load("verifiers:tests.unit.environments.looked_up")
    played = asyncio.run(play(environment, environment.task(0), Script([call_of("look_up", name="amber"), "4711"]), 60))
    assert (played.error, played.reward) == (None, 1.0)
    first, second = played.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["look_up"]
    assert (second["messages"][-1]["role"], second["messages"][-1]["content"]) == ("tool", "4711")


def test_verifiers_is_loaded_in_any_thread_and_leaves_the_handlers_of_signals():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    environment = asyncio.run(asyncio.to_thread(load, HUB, count=3))
    assert len(environment) == len(load(HUB, count=3)) == 3
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_cancelled_episode_of_an_mcp_server_is_cancelled_and_its_server_ends(codes):
    name, options = codes
    environment = load(name, **options)

    async def cancel() -> None:
        script = Script([""], hangs=True)
        async with httpx.AsyncClient(transport=httpx.MockTransport(script.answer)) as http:
            model = Model(AsyncOpenAI(base_url="http://script", api_key="x", http_client=http))
            episode = asyncio.ensure_future(environment.play(environment.task(0), model))
            while not script.requests:
                await asyncio.sleep(0.05)
            episode.cancel()
            with pytest.raises(asyncio.CancelledError):
                await episode

    asyncio.run(cancel())
    assert [child for child in psutil.Process().children() if "codes_server.py" in " ".join(child.cmdline())] == []


def test_the_policy_sees_the_tools_of_the_server_and_their_results(codes):
    name, options = codes
    environment = load(name, **options)
    task = environment.task(1)
    played = asyncio.run(play(environment, task, Script(task.good), 60))
    assert played.reward == 1.0
    first, second = played.requests
    (tool,) = first["tools"]
    assert (tool["function"]["name"], list(tool["function"]["parameters"]["properties"])) == ("look_up", ["name"])
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "1", "content": "1234"}
    no_object = {"content": "", "tool_calls": [{**call_of("look_up")["tool_calls"][0]}]}
    no_object["tool_calls"][0]["function"] = {"name": "look_up", "arguments": "[1]"}
    wrong = asyncio.run(play(environment, task, Script([call_of("nothing"), call_of("look_up"), no_object, "?"]), 60))
    assert (wrong.error, wrong.reward) == (None, 0.0)
    assert len(wrong.requests) == 4, "a wrong call is answered with its error"
    assert wrong.requests[-1]["messages"][-1]["content"] == "the arguments are not a JSON object"


@pytest.fixture
def served(codes):
    """(name, options, event) of the same tasks with a server of this process over HTTP. The event lets ``wait`` end."""
    from mcp.server.fastmcp import FastMCP

    server, released = FastMCP("codes", log_level="ERROR"), threading.Event()

    @server.tool()
    def look_up(name: str) -> str:
        return CODES.get(name, "unknown name")

    @server.tool()
    async def wait() -> str:
        await asyncio.to_thread(released.wait, 60)
        return "done"

    with serving(server.streamable_http_app()) as (url, end):

        def stop() -> None:
            released.set()
            end()

        yield codes[0], {"url": f"{url}/mcp"}, stop
        released.set()


def test_tools_of_an_mcp_server_pass_the_doctor(served):
    name, options, _ = served
    assert problems(name, tasks=2, **options) == {}


def test_a_server_over_http_serves_episodes_at_once(served):
    name, options, _ = served
    environment = load(name, **options)

    async def all_tasks() -> list[float | None]:
        tasks = [environment.task(index) for index in range(len(environment))]
        return [one.reward for one in await asyncio.gather(*(play(environment, t, Script(t.good), 60) for t in tasks))]

    assert asyncio.run(all_tasks()) == [1.0] * len(CODES)


def test_a_server_over_http_that_is_silent_or_gone_fails_the_episode(served):
    name, options, stop = served
    environment = load(name, **options)
    environment.call_timeout = 1.0
    silent = asyncio.run(play(environment, environment.task(0), Script([call_of("wait"), "?"]), 60))
    assert isinstance(silent.error, ConnectionError)
    assert str(silent.error).startswith(f"MCP server {options['url']}: Timed out while waiting for response to")
    stop()
    gone = asyncio.run(play(environment, environment.task(0), Script([call_of("wait"), "?"]), 60))
    assert isinstance(gone.error, ConnectionError)
    assert "connection attempts failed" in str(gone.error)


def test_an_error_of_the_engine_leaves_the_server_as_it_is(codes):
    name, options = codes
    environment = load(name, **options)
    failed = asyncio.run(play(environment, environment.task(0), Script([""], fails=True), 60))
    assert type(failed.error).__name__ == "InternalServerError"


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "mcp", Adapter("x:y", "a_package_that_does_not_exist", "mcp"))
    with pytest.raises(ConfigError, match=r"needs a_package_that_does_not_exist .*: pip install 'slime\[mcp\]'"):
        load("mcp:rows.jsonl")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reasoning-gym:no_such", {}, "'no_such' not registered"),
        ("reasoning-gym:chain_sum", {"sise": 3}, '{"sise": 3}.*unexpected keyword argument'),
        ("no_such", {}, "names no function"),
        ("mcp:rows.jsonl", {}, "mcp:rows.jsonl: give the server as command or as url, one of them"),
        ("mcp:rows.jsonl", {"command": ["x"], "url": "http://x"}, "as command or as url, one of them"),
        ("mcp:rows.jsonl", {"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
    ],
)
def test_a_wrong_name_or_option_is_an_error_that_names_it(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load(name, **options)


def test_every_adapter_names_an_extra_of_the_project():
    text = (EXAMPLE.parents[1] / "pyproject.toml").read_text()
    for name, adapter in ADAPTERS.items():
        assert not adapter.package or f"\n{adapter.extra} = [" in text, name


def num_lines(source: str, name: str) -> int:
    """Lines of code of a class with those of all other names of its module that it uses, without docstrings."""
    tree, lines = ast.parse(source), source.splitlines()
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    documented = {number for node in texts for number in range(node.lineno, node.end_lineno + 1)}
    found = {node.name: node for node in tree.body if hasattr(node, "name")}
    found |= {target.id: node for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    used, count = [name], 0
    for one in used:
        node = found[one]
        used += {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and x.id in found} - set(used)
        begin = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        code = (lines[n - 1].strip() for n in range(begin, node.end_lineno + 1) if n not in documented)
        count += sum(line != "" and not line.startswith("#") for line in code)
    return count


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_has_at_most_40_lines_of_code(name):
    module, _, maker = ADAPTERS[name].path.partition(":")
    source = (EXAMPLE.parents[1] / f"{module.replace('.', '/')}.py").read_text("utf-8")
    assert num_lines(source, maker) <= 40


def test_the_tasks_of_an_environment_become_rows(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    words = ["tasks", "reasoning-gym:chain_sum", "--options", '{"seed": 3}', "--begin", "2", "--count", "3"]
    assert main([*words, "--output", str(path)]) == 0
    assert "3 tasks of reasoning-gym:chain_sum" in capsys.readouterr().out
    rows = list(read_file(str(path)))
    assert [row["metadata"]["task"] for row in rows] == [2, 3, 4]
    task = load("reasoning-gym:chain_sum", seed=3).task(4)
    assert (rows[2]["prompt"], rows[2]["label"]) == (task.prompt, task.answer)
    assert rows[2]["metadata"]["options"] == {"seed": 3}
    assert main(["tasks", "reasoning-gym:x", "--output", str(path)]) == 2


def test_a_row_that_is_not_a_task_or_that_has_changed_is_an_error_with_the_fix():
    with pytest.raises(DataError, match="slime tasks NAME"):
        asyncio.run(generate(Namespace(), Sample(index=1, prompt=[], metadata={"x": 1}), {}))
    facts = {"environment": "reasoning-gym:chain_sum", "options": {}, "task": 0}
    with pytest.raises(DataError, match="has another prompt than its row"):
        asyncio.run(generate(Namespace(), Sample(index=1, prompt="text", metadata=facts), {}))


def test_a_doctor_of_a_missing_environment_ends_with_two(capsys):
    assert main(["doctor", "env", "reasoning-gym:no_such"]) == 2
    assert "not registered" in capsys.readouterr().err


def test_the_doctor_prints_its_findings_and_fails_with_one(capsys):
    name = "tests.unit.doctor.test_environment_doctor:AllIsRewarded"
    assert main(["doctor", "env", name, "--tasks", "2", "--json"]) == 1
    (bad,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["status"] != "ok"][:1]
    assert bad["what"] == "known-bad replies"


def test_an_episode_reaches_the_adapter_although_the_environment_names_a_proxy(monkeypatch):
    async def chat(request):
        choice = {"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}
        kind = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        return web.json_response(kind | {"choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    server = run_app_in_thread(app)

    class Service:
        url = f"http://127.0.0.1:{server.port}"

        def __init__(self, args): ...

        async def run(self, args, sample, params, work, *, evaluation):
            return await work("sid")

    class One:
        async def play(self, task, model):
            return float((await model.reply(task.prompt))["content"])

    task = Task([{"role": "user", "content": "2+2"}])
    monkeypatch.setattr(rollout, "EnvironmentService", Service)
    monkeypatch.setattr(rollout, "_task", lambda *place: (One(), task))
    monkeypatch.setattr(rollout, "_MAX_RETRIES", 0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    sample = Sample(prompt=task.prompt, metadata={"environment": "x", "options": {}, "task": 0})
    assert asyncio.run(rollout.generate(None, sample, {})) == (4.0, {})
    server.stop()
