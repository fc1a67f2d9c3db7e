"""Environments of other packages. A class is loaded by its name in ``slime.environments.ADAPTERS``.

Each class has at most 50 lines of code. ``__init__`` imports the package, after the table's check that it is installed.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import httpx

from slime.data.rows import read_file
from slime.environments import Message, Model, Task, converse
from slime.hooks.load import load_function
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


class McpTools:
    """Questions that are answered with the tools of an MCP server: ``mcp:rows.jsonl``.

    Args:
        rows: JSONL file with ``prompt`` (text or messages), ``label``, and perhaps ``good``, the right replies.
        command: program and arguments of the server, which speaks MCP over its standard streams. One process per
            episode, so episodes cannot disturb each other.
        url: instead of ``command``, a running server that speaks MCP over streamable HTTP. One session per episode.
        call_timeout: seconds for one answer of the server. Then the episode fails, and the run tries it again.
        reward: ``module:function`` of the last reply and the label. Default: 1 if both are the same text.
        max_turns: replies of an episode.
    """

    reward_range = (0.0, 1.0)

    def __init__(
        self,
        rows: str,
        command: Sequence[str] = (),
        reward: str = "",
        max_turns: int = 8,
        url: str = "",
        call_timeout: float = 300.0,
    ) -> None:
        if bool(command) == bool(url):
            raise ConfigError(f"mcp:{rows}: give the server as command or as url, one of them")
        if command and shutil.which(command[0]) is None:
            raise ConfigError(f"mcp:{rows}: command: there is no program {command[0]!r}")
        self._rows = list(read_file(rows))
        self._command, self._url, self._timeout = list(command), url, timedelta(seconds=call_timeout)
        self._grade = load_function(reward, "reward") if reward else lambda text, label: text.strip() == label.strip()
        self._max_turns = max_turns

    def __len__(self) -> int:
        return len(self._rows)

    def task(self, index: int) -> Task:
        row = self._rows[index]
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Task(messages, str(row["label"]), tuple(row["good"]) if row.get("good") else None)

    async def play(self, task: Task, model: Model) -> float:
        from mcp import McpError

        try:
            async with _tools(self._command, self._url, self._timeout) as (tools, call):
                text = await converse(model, task.prompt, tools, call, max_turns=self._max_turns)
        except ExceptionGroup as group:
            if (episode := asyncio.current_task()) is not None and episode.cancelling():
                raise asyncio.CancelledError from group  # the streams break while they are closed, and hide it
            error = _first(group)
            if isinstance(error, McpError | httpx.HTTPError):
                raise ConnectionError(
                    f"MCP server {self._url or self._command}: {str(error) or type(error).__name__}"
                ) from group
            raise error from group
        return float(await asyncio.to_thread(self._grade, text, task.answer))


@asynccontextmanager
async def _tools(
    command: Sequence[str], url: str, timeout: timedelta
) -> AsyncIterator[tuple[list[Message], Callable[[str, dict[str, Any]], Awaitable[str]]]]:
    """A session with an MCP server: its tools, and the function that calls them."""
    from mcp import ClientSession

    # The limit of the session holds for every answer: an HTTP stream may stay open without one.
    async with _streams(command, url, timeout) as streams, ClientSession(*streams, timeout) as session:
        await session.initialize()
        offered = [tool.model_dump(by_alias=True) for tool in (await session.list_tools()).tools]

        async def call(name: str, arguments: dict[str, Any]) -> str:
            result = await session.call_tool(name, arguments)
            return "\n".join(part.text for part in result.content if part.type == "text")

        yield [_as_function(tool["name"], tool["description"], tool["inputSchema"]) for tool in offered], call


@asynccontextmanager
async def _streams(command: Sequence[str], url: str, timeout: timedelta) -> AsyncIterator[tuple[Any, Any]]:
    """The streams of a session with a server. The package resumes a broken HTTP connection."""
    from mcp import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if command:
        async with stdio_client(StdioServerParameters(command=command[0], args=list(command[1:]))) as both:
            yield both
        return
    async with (
        httpx.AsyncClient(timeout=timeout.total_seconds()) as client,
        streamable_http_client(url, http_client=client) as (received, sent, _),
    ):
        yield received, sent


def _first(error: Exception) -> Exception:
    """The error inside groups of task groups."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


def _as_function(name: str, description: str | None, parameters: dict[str, Any]) -> Message:
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


class OpenEnv:
    """An environment of an OpenEnv server: ``openenv:http://HOST:PORT``. Task ``i`` is the episode of seed ``i``.

    Args:
        url: address of the server, which must serve as many sessions as episodes run at once.
        action: field of the environment's action that holds the reply of the policy. Without it the policy has tools:
            those of an MCP environment, else one tool ``step`` with the fields of the action.
        observation: field of the observation that the policy reads. Default: all fields, as JSON.
        answer: field of the state after a reset with the right reply or a list, one per turn, for ``slime doctor env``.
        size: number of tasks.
        max_turns: replies of an episode.
        call_timeout: seconds for one answer of the server. Then the episode fails, and the run tries it again.
        reward_range: lowest and highest sum of an episode's rewards.
    """

    def __init__(
        self,
        url: str,
        action: str = "",
        observation: str = "",
        answer: str = "",
        size: int = 1000,
        max_turns: int = 8,
        call_timeout: float = 300.0,
        reward_range: Sequence[float] = (0.0, 1.0),
    ) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self.reward_range, self._size, self._max_turns = (reward_range[0], reward_range[1]), size, max_turns
        self._url, self._action, self._observation, self._answer = url, action, observation, answer
        self._session = functools.partial(GenericEnvClient, url, message_timeout_s=call_timeout, mode="simulation")
        schema = _schemas(url, call_timeout, action=action, observation=observation)["action"]
        self._is_mcp = schema["title"] == "CallToolAction"
        self._tools = [] if action else _listed(self._session()) if self._is_mcp else [_as_function("step", "", schema)]

    def __len__(self) -> int:
        return self._size

    def task(self, index: int) -> Task:
        with _failures(self._url), self._session().sync() as session:
            prompt = _seen(session.reset(seed=index), self._observation)
            state = session.state() if self._answer else {}
        if self._answer and self._answer not in state:
            raise ConfigError(f"openenv:{self._url}: answer: {self._answer!r} is not in the state: {', '.join(state)}")
        known = state.get(self._answer)
        good = None if known is None else tuple(map(str, known if isinstance(known, list) else [known]))
        return Task([{"role": "user", "content": prompt}], good[-1] if good else None, good, index)

    async def play(self, task: Task, model: Model) -> float:
        rewards = [0.0]
        async with self._session() as session:

            async def step(name: str, arguments: dict[str, Any]) -> str:
                call = {"type": "call_tool", "tool_name": name, "arguments": arguments}
                with _failures(self._url):
                    result = await _step(session, call if self._is_mcp else arguments)
                rewards.append(result.reward or 0.0)
                if result.done:
                    raise _Over
                return _seen(result, self._observation)

            with _failures(self._url):
                await session.reset(seed=task.data)
            with suppress(_Over):
                if self._tools:
                    await converse(model, task.prompt, self._tools, step, max_turns=self._max_turns)
                else:
                    await _talk(model, task.prompt, lambda text: step("", {self._action: text}), self._max_turns)
        return sum(rewards)


class _Over(Exception):
    """The environment has ended the episode."""


def _schemas(url: str, timeout: float, **fields: str) -> dict[str, Any]:
    """The schemas of an environment, which have ``fields``: name of a schema -> name of a field, or ""."""
    try:
        schemas: dict[str, Any] = httpx.get(f"{url.rstrip('/')}/schema", timeout=timeout).raise_for_status().json()
        known = {kind: schemas[kind]["properties"] for kind in ("action", "observation")}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise ConfigError(f"openenv:{url}: this address is not an OpenEnv server: {error!r}") from error
    known["action"].pop("metadata", None)  # every action has it
    for kind, field in fields.items():
        if field and field not in known[kind]:
            raise ConfigError(f"openenv:{url}: {kind}: {field!r} is not one of its fields {', '.join(known[kind])}")
    return schemas


def _listed(client: Any) -> list[Message]:
    """The tools of an MCP environment."""
    with client.sync() as session:
        tools = session.step({"type": "list_tools"}).observation["tools"]
    return [_as_function(tool["name"], tool["description"], tool["input_schema"]) for tool in tools]


def _seen(result: Any, field: str) -> str:
    """The text of an observation."""
    seen = {name: value for name, value in result.observation.items() if name != "metadata"}
    return str(seen[field]) if field in seen else json.dumps(seen)


async def _talk(model: Model, prompt: Sequence[Message], say: Callable[[str], Awaitable[str]], turns: int) -> None:
    """Pass every reply of the model to ``say``, which returns the next message of the user."""
    messages = list(prompt)
    for _ in range(turns):
        messages.append(await model.reply(messages))
        messages.append({"role": "user", "content": await say(messages[-1].get("content") or "")})


async def _step(session: Any, action: dict[str, Any]) -> Any:
    """The result of an action. One without the right fields is the model's mistake, and its result is the error."""
    from openenv.core.client_types import StepResult

    try:
        return await session.step(action)
    except RuntimeError as error:
        if "(code: VALIDATION_ERROR)" not in str(error):  # the client has no class per error
            raise
        return StepResult({"error": "the action does not have the fields of the environment's actions"})


@contextmanager
def _failures(url: str) -> Iterator[None]:
    """Raise a ConnectionError with the address if the server is silent or gone, or if its environment fails."""
    from websockets.exceptions import ConnectionClosed

    try:
        yield
    except (RuntimeError, OSError, ConnectionClosed) as error:
        raise ConnectionError(f"OpenEnv server {url}: {str(error) or type(error).__name__}") from error
