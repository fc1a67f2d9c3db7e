"""Environments of other packages. A class is loaded by its name in ``slime.environments.ADAPTERS``.

Each class has at most 40 lines of code. ``__init__`` imports the package, after the table's check that it is installed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import httpx

from slime.agent.adapters.openai import chat_of_request, response_of_chat
from slime.data.rows import numbered_rows, read_file
from slime.environments import Message, Model, Over, Task, as_tool, converse, server_errors
from slime.hooks.load import load_function
from slime.utils.errors import ConfigError, DataError


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
class Rows:
    """Tasks of a JSONL file with ``prompt`` (text or messages), ``label``, and perhaps ``good``, the right replies.

    Args:
        rows: the file.
        reward: ``module:function`` of the last reply and the label. Default: 1 if both are the same text.
    """

    rows: str
    reward: str = ""
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        self._rows = list(read_file(self.rows))
        self._grade: Callable[..., Any] = load_function(self.reward, "reward") if self.reward else _is_same

    def __len__(self) -> int:
        return len(self._rows)

    def task(self, index: int) -> Task:
        row = self._rows[index]
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Task(messages, str(row["label"]), tuple(row["good"]) if row.get("good") else None)

    async def graded(self, text: str, task: Task) -> float:
        """The reward of the last reply."""
        return float(await asyncio.to_thread(self._grade, text, task.answer))


def _is_same(text: str, label: str) -> bool:
    return text.strip() == label.strip()


@dataclass
class McpTools(Rows):
    """Questions that are answered with the tools of an MCP server: ``mcp:rows.jsonl``.

    Args:
        command: program and arguments of the server, which speaks MCP over its standard streams. One process per
            episode, so episodes cannot disturb each other.
        url: instead of ``command``, a running server that speaks MCP over streamable HTTP. One session per episode.
        call_timeout: seconds for one answer of the server. Then the episode fails, and the run tries it again.
        max_turns: replies of an episode.
    """

    command: Sequence[str] = ()
    max_turns: int = 8
    url: str = ""
    call_timeout: float = 300.0

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"mcp:{self.rows}: give the server as command or as url, one of them")
        if self.command and shutil.which(self.command[0]) is None:
            raise ConfigError(f"mcp:{self.rows}: command: there is no program {self.command[0]!r}")
        super().__post_init__()

    async def play(self, task: Task, model: Model) -> float:
        from mcp import McpError

        with server_errors(f"MCP server {self.url or list(self.command)}", McpError, httpx.HTTPError):
            async with self._session() as session:
                offered = (await session.list_tools()).tools

                async def call(name: str, arguments: dict[str, Any]) -> str:
                    result = await session.call_tool(name, arguments)
                    return "\n".join(part.text for part in result.content if part.type == "text")

                tools = [as_tool(tool.name, tool.description, tool.inputSchema) for tool in offered]
                text = await converse(model, task.prompt, tools, call, max_turns=self.max_turns)
        return await self.graded(text, task)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Any]:
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        async with AsyncExitStack() as stack:
            if self.command:
                transport = stdio_client(StdioServerParameters(command=self.command[0], args=list(self.command[1:])))
            else:
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=self.call_timeout))
                transport = streamable_http_client(self.url, http_client=client)
            received, sent, *_ = await stack.enter_async_context(transport)
            # The limit of the session holds for every answer: an HTTP stream may stay open without one.
            limit = timedelta(seconds=self.call_timeout)
            session = await stack.enter_async_context(ClientSession(received, sent, limit))
            await session.initialize()
            yield session


@dataclass
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

    url: str
    action: str = ""
    observation: str = ""
    answer: str = ""
    size: int = 1000
    max_turns: int = 8
    call_timeout: float = 300.0
    reward_range: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        self.reward_range = (self.reward_range[0], self.reward_range[1])  # JSON has lists only
        schema = _schemas(self.url, self.call_timeout, action=self.action, observation=self.observation)["action"]
        self._is_mcp = schema["title"] == "CallToolAction"
        self._tools = [] if self.action else _listed(self._session()) if self._is_mcp else [as_tool("step", "", schema)]

    def _session(self) -> Any:
        from openenv.core.generic_client import GenericEnvClient

        return GenericEnvClient(self.url, message_timeout_s=self.call_timeout, mode="simulation")

    def __len__(self) -> int:
        return self.size

    def task(self, index: int) -> Task:
        with _failures(self.url), self._session().sync() as session:
            prompt = _seen(session.reset(seed=index), self.observation)
            known = _known(self.url, session.state(), self.answer) if self.answer else None
        return Task([{"role": "user", "content": prompt}], known[-1] if known else None, known, index)

    async def play(self, task: Task, model: Model) -> float:
        rewards = [0.0]
        async with self._session() as session:

            async def step(name: str, arguments: dict[str, Any]) -> str:
                call = {"type": "call_tool", "tool_name": name, "arguments": arguments}
                with _failures(self.url):
                    result = await _step(session, call if self._is_mcp else arguments)
                rewards.append(result.reward or 0.0)
                if result.done:
                    raise Over
                return _seen(result, self.observation)

            with _failures(self.url):
                await session.reset(seed=task.data)
            say = None if self._tools else lambda text: step("", {self.action: text})
            await converse(model, task.prompt, self._tools, step, max_turns=self.max_turns, say=say)
        return sum(rewards)


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
    return [as_tool(tool["name"], tool["description"], tool["input_schema"]) for tool in tools]


def _seen(result: Any, field: str) -> str:
    """The text of an observation."""
    seen = {name: value for name, value in result.observation.items() if name != "metadata"}
    return str(seen[field]) if field in seen else json.dumps(seen)


def _known(url: str, state: dict[str, Any], field: str) -> tuple[str, ...] | None:
    """The right replies."""
    if field not in state:
        raise ConfigError(f"openenv:{url}: answer: {field!r} is not in the state: {', '.join(state)}")
    known = state[field]
    return None if known is None else tuple(map(str, known if isinstance(known, list) else [known]))


async def _step(session: Any, action: dict[str, Any]) -> Any:
    """The result of an action. One without the right fields is the model's mistake, and its result is the error."""
    from openenv.core.client_types import StepResult

    try:
        return await session.step(action)
    except RuntimeError as error:
        if "(code: VALIDATION_ERROR)" not in str(error):  # the client has no class per error
            raise
        return StepResult({"error": "the action does not have the fields of the environment's actions"})


def _failures(url: str) -> AbstractContextManager[None]:
    """Errors of a server that is silent or gone, or whose environment fails."""
    from websockets.exceptions import ConnectionClosed

    return server_errors(f"OpenEnv server {url}", RuntimeError, OSError, ConnectionClosed)


@dataclass
class NemoGym:
    """A resources server of NeMo Gym, and rows in the package's format: ``nemo-gym:ROWS.jsonl``.

    An episode is a session of the server: ``POST /seed_session`` with the row, ``POST /TOOL`` with the arguments of
    each call, and ``POST /verify`` with the row and the replies, whose answer has the reward.

    Args:
        rows: the file. A row's ``responses_create_params`` has ``input``, and perhaps ``instructions`` and ``tools``.
            Its ``good``, if any, are the right replies.
        url: address of the server.
        answer: field of the rows with the right answer, which becomes the label.
        max_turns: replies of an episode.
        call_timeout: seconds for one answer of the server. Then the episode fails, and the run tries it again.
        reward_range: lowest and highest reward.
    """

    rows: str
    url: str
    answer: str = ""
    max_turns: int = 8
    call_timeout: float = 300.0
    reward_range: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        self.reward_range = (self.reward_range[0], self.reward_range[1])  # JSON has lists only
        self._tasks = [_asked(where, row, self.answer) for where, row in numbered_rows(self.rows)]

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        return self._tasks[index]

    async def play(self, task: Task, model: Model) -> float:
        row, tools = task.data
        history: list[Message] = []
        async with httpx.AsyncClient(base_url=self.url, timeout=self.call_timeout) as session:

            async def call(name: str, arguments: dict[str, Any]) -> str:
                # No other route: the policy could verify a reply, or begin again.
                is_offered = any(tool["function"]["name"] == name for tool in tools)
                return await _post(session, name, arguments, most=500) if is_offered else "there is no such tool"

            await _post(session, "seed_session", row)
            await converse(model, task.prompt, tools, call, max_turns=self.max_turns, history=history)
            replies = response_of_chat(history[len(task.prompt) :], model.name)
            verified = await _post(session, "verify", row | {"response": replies})
        with server_errors(f"NeMo Gym server {self.url}: POST /verify: no reward", LookupError, ValueError, TypeError):
            return float(json.loads(verified)["reward"])


_FIXES = {404: "start the resources server of these rows", 422: "give the rows of this server"}


def _asked(where: str, row: dict[str, Any], answer: str) -> Task:
    """The task of a row of NeMo Gym, with the row and its tools as data."""
    try:
        asked, good = row["responses_create_params"], row.pop("good", None)
        prompt, tools = chat_of_request(asked)
        label = str(row[answer]) if answer else None
    except (KeyError, AttributeError, ValueError) as error:
        wanted = "responses_create_params with input, and the field that answer names"
        raise DataError(f"{where}: a row of NeMo Gym has {wanted}: {error!r}") from error
    # The quotes of a text are escaped in JSON, so these are a type.
    if not prompt or '"input_image"' in json.dumps(asked["input"]):
        raise DataError(f"{where}: its input is empty or has images: give rows of texts")
    return Task(prompt, label, tuple(good) if good else None, (row, tools))


async def _post(session: httpx.AsyncClient, route: str, body: dict[str, Any], *, most: int = 299) -> str:
    """The answer of a server of NeMo Gym.

    Args:
        most: highest status that is no failure. To the package's agent the errors of a tool are results.

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
