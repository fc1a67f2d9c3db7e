"""Environments of other packages. A class is loaded by its name in ``slime.environments.ADAPTERS``.

An adapter has at most 40 lines of code. It imports its package lazily, after the table's check.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import anyio
import httpx

from slime.agent.adapters.openai import chat_of_request, response_of_chat
from slime.agent.docker_sandbox import built_image
from slime.agent.sandbox import exec_and_wait, write_folder
from slime.environments import (
    Call,
    Message,
    Model,
    Rows,
    Served,
    Step,
    Stepped,
    Task,
    as_tool,
    chosen,
    converse,
    right_replies,
    server_errors,
    shell_tool,
)
from slime.hooks import load_function
from slime.utils.errors import ConfigError


class ReasoningGym:
    """A generator of reasoning-gym, with its grader: ``reasoning-gym:chain_sum``.

    Args:
        dataset: name of the generator.
        system_prompt: name of one of the package's prompts, or a text. All of them ask for ``<answer>`` tags. An empty
            one asks for nothing, and the whole reply is graded.
        config: the generator's settings. ``size`` is 1000 by default, ``seed`` 0.
    """

    reward_range = (0.0, 1.0)

    def __init__(self, dataset: str, system_prompt: str = "default", **config: Any) -> None:
        from reasoning_gym import create_dataset
        from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

        self._extract = extract_answer if system_prompt else str.strip
        self._system = SYSTEM_PROMPTS.get(system_prompt, system_prompt)
        # Without a seed every process would draw other tasks.
        self._data = create_dataset(dataset, **{"seed": 0, "size": 1000} | config)

    def __len__(self) -> int:
        return len(self._data)

    def task(self, index: int) -> Task:
        entry = self._data[index]
        prompt: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        prompt.append({"role": "user", "content": entry["question"]})
        answer = entry["answer"]
        good = f"<answer>{answer}</answer>" if self._system else answer
        return Task(prompt, answer, None if answer is None else (good,), entry)

    async def play(self, task: Task, model: Model) -> float:
        message = await model.reply(task.prompt)
        # In a thread: some graders compute for seconds, and the event loop serves all other episodes.
        score = asyncio.to_thread(self._data.score_answer, self._extract(message.get("content") or ""), task.data)
        return float(await score)


class Verifiers:
    """An environment in the format of the package's hub: ``verifiers:my-env``, an installed module ``my_env``.

    Args:
        env: its id. The part before a slash, the owner, is ignored.
        options: arguments of its ``load_environment``.
    """

    def __init__(self, env: str, **options: Any) -> None:
        import verifiers

        # Its handlers of signals would replace those of the run. Python refuses them outside of the main thread.
        with mock.patch("verifiers.envs.environment.signal"):
            self._env = verifiers.load_environment(env, **options)
        self._data = self._env.get_dataset()
        weights = self._env.rubric._get_reward_weights()
        # Reward functions of the package give 0 to 1.
        self.reward_range = (sum(min(w, 0.0) for w in weights), sum(max(w, 0.0) for w in weights))

    def __len__(self) -> int:
        return len(self._data)

    def task(self, index: int) -> Task:
        row = dict(self._data[index])
        answer = str(row.get("answer") or "") or None
        return Task(row["prompt"], answer, None if answer is None else (self._written(answer),), row)

    def _written(self, answer: str) -> str:
        """The answer in the form that the environment's parser reads."""
        from verifiers import XMLParser

        parser = self._env.parser
        if not isinstance(parser, XMLParser):
            return answer
        return str(parser.format(**dict.fromkeys(parser.get_fields(), "") | {parser.answer_field: answer}))

    async def play(self, task: Task, model: Model) -> float:
        from verifiers.errors import EmptyModelResponseError, ToolError

        state = await self._env.rollout(task.data, model.client, model.name)
        error = state["error"]  # the package keeps errors, and would score what there is
        is_models = isinstance(error, EmptyModelResponseError | ToolError)
        if error is not None and not is_models:
            raise error
        await self._env.rubric.score_rollout(state)
        return float(state["reward"])


@dataclass
class McpTools(Served, Rows):
    """Questions that are answered with the tools of an MCP server: ``mcp:rows.jsonl``.

    Args:
        command: program and arguments of the server, which speaks MCP over its standard streams. One process per
            episode, so episodes cannot disturb each other.
        url: instead of ``command``, a running server that speaks MCP over streamable HTTP. One session per episode.
        reward: ``module:function`` of the last reply and the label.
    """

    command: Sequence[str] = ()
    url: str = ""
    reward: str = "slime.environments:same_text"

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"mcp:{self.rows}: give the server as command or as url, one of them")
        if self.command and shutil.which(self.command[0]) is None:
            raise ConfigError(f"mcp:{self.rows}: command: there is no program {self.command[0]!r}")
        self._grade = load_function(self.reward, "reward")
        super().__post_init__()

    async def play(self, task: Task, model: Model) -> float:
        from mcp import McpError

        with server_errors(f"MCP server {self.url or list(self.command)}", McpError, httpx.HTTPError):
            async with self._session() as session:

                async def call(name: str, arguments: dict[str, Any]) -> str:
                    result = await session.call_tool(name, arguments)
                    return "\n".join(part.text for part in result.content if part.type == "text")

                offered = (await session.list_tools()).tools
                tools = [as_tool(tool.name, tool.description, tool.inputSchema) for tool in offered]
                episode = await converse(model, task.prompt, tools, call, max_turns=self.max_turns)
        return float(await asyncio.to_thread(self._grade, episode.text, task.answer))

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Any]:
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        # The limit of the session holds for every answer: an HTTP stream may stay open without one.
        limit = timedelta(seconds=self.call_timeout)
        async with httpx.AsyncClient(timeout=self.call_timeout) as client:
            if self.url:
                transport = streamable_http_client(self.url, http_client=client)
            else:
                transport = stdio_client(StdioServerParameters(command=self.command[0], args=list(self.command[1:])))
            async with transport as (received, sent, *_), ClientSession(received, sent, limit) as session:
                await session.initialize()
                yield session


@dataclass
class OpenEnv(Stepped):
    """An environment of an OpenEnv server: ``openenv:http://HOST:PORT``.

    Without ``action`` the policy has the tools of an MCP environment, else one tool ``step`` with the action's fields.

    Args:
        url: address of the server, which must serve as many sessions as episodes run at once.
    """

    url: str
    hidden = frozenset({"metadata"})

    def __post_init__(self) -> None:
        errors = httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError
        with server_errors(f"openenv:{self.url}: this address is not an OpenEnv server", *errors):
            answer = httpx.get(f"{self.url.rstrip('/')}/schema", timeout=self.call_timeout).raise_for_status()
            self._schema = answer.json()["action"]
            self._schema["properties"].pop("metadata", None)  # every action has it
        chosen(f"openenv:{self.url}: action", self._schema["properties"], self.action)
        self._is_mcp = self._schema["title"] == "CallToolAction" and not self.action

    def first(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        with self._errors(), self._client().sync() as session:
            return session.reset(seed=seed).observation, session.state()

    @asynccontextmanager
    async def begun(self, seed: int) -> AsyncIterator[tuple[Sequence[Message], Call]]:
        with self._errors():
            async with self._client() as session:

                async def call(name: str, arguments: dict[str, Any]) -> Step | str:
                    mcp = {"type": "call_tool", "tool_name": name, "arguments": arguments}
                    try:
                        result = await session.step(mcp if self._is_mcp else arguments)
                    except RuntimeError as error:
                        if "(code: VALIDATION_ERROR)" not in str(error):  # the client has no class per error
                            raise
                        return "the action does not have the fields of the environment's actions"
                    return Step(self.seen(result.observation), result.reward or 0.0, result.done)

                await session.reset(seed=seed)
                tools = [] if self.action else [as_tool("step", "", self._schema)]
                if self._is_mcp:
                    offered = (await session.step({"type": "list_tools"})).observation["tools"]
                    tools = [as_tool(tool["name"], tool["description"], tool["input_schema"]) for tool in offered]
                yield tools, call

    def _client(self) -> Any:
        from openenv.core.generic_client import GenericEnvClient

        return GenericEnvClient(self.url, message_timeout_s=self.call_timeout, mode="simulation")

    def _errors(self) -> AbstractContextManager[None]:
        from websockets.exceptions import ConnectionClosed

        return server_errors(f"OpenEnv server {self.url}", RuntimeError, OSError, ConnectionClosed)


@dataclass
class NemoGym(Served, Rows):
    """A resources server of NeMo Gym, and rows in the package's format: ``nemo-gym:ROWS.jsonl``.

    An episode is a session of the server: ``POST /seed_session`` with the row, ``POST /TOOL`` with the arguments of
    each call, and ``POST /verify`` with the row and the replies, whose answer has the reward.

    Args:
        rows: the file. A row's ``responses_create_params`` has ``input``, and perhaps ``instructions`` and ``tools``.
            Its ``good``, if any, are the right replies.
        url: address of the server.
        answer: field of the rows with the right answer, which becomes the label.
    """

    url: str
    answer: str = ""
    wanted = "a row of NeMo Gym has responses_create_params with input, and the field that answer names"

    def read(self, row: dict[str, Any]) -> Task:
        asked, good = row["responses_create_params"], row.pop("good", None)
        prompt, tools = chat_of_request(asked)
        # The quotes of a text are escaped in JSON, so these are a type.
        if not prompt or '"input_image"' in json.dumps(asked["input"]):
            raise ValueError("its input is empty or has images: give rows of texts")
        return Task(prompt, str(row[self.answer]) if self.answer else None, right_replies(good), (row, tools))

    async def play(self, task: Task, model: Model) -> float:
        row, tools = task.data
        async with httpx.AsyncClient(base_url=self.url, timeout=self.call_timeout) as session:

            async def call(name: str, arguments: dict[str, Any]) -> str:
                # To the package's agent the errors of a tool are results.
                return await _post(session, name, arguments, most=500)

            await _post(session, "seed_session", row)
            episode = await converse(model, task.prompt, tools, call, max_turns=self.max_turns)
            replies = response_of_chat(episode.messages[len(task.prompt) :], model.name)
            verified = await _post(session, "verify", row | {"response": replies})
        with server_errors(f"NeMo Gym server {self.url}: POST /verify: no reward", LookupError, ValueError, TypeError):
            return float(json.loads(verified)["reward"])


_FIXES = {404: "start the resources server of these rows", 422: "give the rows of this server"}


async def _post(session: httpx.AsyncClient, route: str, body: dict[str, Any], *, most: int = 299) -> str:
    """The answer of a server of NeMo Gym.

    Args:
        most: highest status that is no failure.

    Raises:
        ConnectionError: another status, or no answer in time.
    """
    where = f"NeMo Gym server {session.base_url}: POST /{route}"
    with server_errors(f"{where}: start the server, or give a longer call_timeout", httpx.HTTPError):
        answer = await session.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
    if answer.status_code > most:
        fix = _FIXES.get(answer.status_code, "read the log of the server")
        raise ConnectionError(f"{where}: status {answer.status_code}: {fix}. Its answer: {answer.text[:500]}")
    return answer.text


_READ_REWARD = "cd /logs/verifier && if [ -e reward.txt ]; then cat reward.txt; else cat reward.json; fi"
"""With both files Harbor takes this one."""


@dataclass
class Harbor:
    """Tasks in Harbor's format, without the package: ``harbor:FOLDER``.

        task.toml          time limits, ``docker_image``, variables of the verifier
        instruction.md     the prompt
        environment/       Dockerfile, built if ``task.toml`` names no image
        tests/test.sh      runs as /tests/test.sh, and writes /logs/verifier/reward.txt or reward.json

    The policy gets one tool, which runs commands in a sandbox. Then the tests are copied there and run.

    Args:
        folder: of one task, or of task folders.
        sandbox: ``module:Class`` that implements :class:`slime.agent.sandbox.Sandbox`. Called with the image.
        sandbox_options: its keyword arguments, such as ``{"run_args": ["--memory=2g"]}``.
        max_turns: replies of an episode.
        command_timeout: seconds for one command of the policy.
    """

    folder: str
    sandbox: str = "slime.agent.docker_sandbox:DockerSandbox"
    sandbox_options: dict[str, Any] = field(default_factory=dict)
    max_turns: int = 50
    command_timeout: int = 120
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        files = [file for depth in ("", "*/") for file in Path(self.folder).glob(f"{depth}task.toml")]
        self._folders, self._sandbox = sorted(file.parent for file in files), load_function(self.sandbox)
        if not self._folders:
            raise ConfigError(f"harbor:{self.folder}: there is no task.toml in it or in a folder of it")

    def __len__(self) -> int:
        return len(self._folders)

    def task(self, index: int) -> Task:
        prompt = (self._folders[index] / "instruction.md").read_text(encoding="utf-8")
        return Task([{"role": "user", "content": prompt}], data=self._folders[index])

    async def play(self, task: Task, model: Model) -> float:
        settings = tomllib.loads((task.data / "task.toml").read_text(encoding="utf-8"))
        agent, verifier, place = (settings.get(name, {}) for name in ("agent", "verifier", "environment"))
        how = place.get("build_timeout_sec", 600), self.sandbox_options.get("command", "docker")
        image = place.get("docker_image") or await asyncio.to_thread(built_image, task.data / "environment", *how)
        async with self._sandbox(image, **self.sandbox_options) as box:
            run, call = shell_tool(box, self.command_timeout)
            # At the limit also a request to the engine is cancelled. The state that the policy reached is graded.
            with anyio.move_on_after(agent.get("timeout_sec")):
                await converse(model, task.prompt, [run], call, max_turns=self.max_turns)
            # After the episode: the policy must not see the tests, nor leave a reward.
            await box.exec("rm -rf /tests /logs/verifier; mkdir -p /tests /logs/verifier", check=True)
            await write_folder(box, "/tests", task.data / "tests")
            limits = {"time_budget_sec": math.ceil(verifier.get("timeout_sec", 600)), "tag": f"harbor-{uuid4().hex}"}
            env = {name: str(value) for name, value in verifier.get("env", {}).items()}
            # By bash: files lose their mode on the way.
            code, _ = await exec_and_wait(box, cmd="bash /tests/test.sh", env=env, **limits)
            _, text, _ = await box.exec(_READ_REWARD)
        try:
            found = json.loads(text) if text.lstrip().startswith("{") else {"reward": float(text)}
            return float(found["reward"] if len(found) > 1 else next(iter(found.values())))
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            wrote = f"tests/test.sh ended with {code} (-1: out of time) and wrote no reward to /logs/verifier"
            raise ValueError(f"{task.data}: {wrote}: {text or 'no reward.txt and no reward.json'}") from error
