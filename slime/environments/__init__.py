"""Environments: tasks, and an episode per task in which the policy answers and earns a reward.

One protocol for all of them. ``load("reasoning-gym:chain_sum")`` makes an environment of the table ``ADAPTERS``, whose
package is imported then. ``load("my_pkg.my_module:MyEnvironment")`` makes one of the user's.

    slime tasks NAME --output train.jsonl        the tasks as prompt data (``slime.doctor.environment_command``)
    slime doctor env NAME                        tests of the environment (``slime.doctor.environment_checks``)
    --prompt-data train.jsonl --custom-generate-function-path slime.environments.rollout.generate
"""

from __future__ import annotations

import abc
import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

from openai import AsyncOpenAI

from slime.agent.sandbox import CommandRefused, Sandbox
from slime.data.rows import numbered_rows
from slime.hooks import load_function
from slime.utils.errors import ConfigError, DataError, DeadlineExceeded

Message = dict[str, Any]
"""A message of OpenAI's chat format."""

_MOST_OUTPUT = 10_000  # characters of a command's output for the policy


@dataclass(frozen=True)
class Task:
    """One task of an environment.

    Attributes:
        prompt: the messages that open the episode.
        answer: the known answer, which is the label of the sample.
        good: replies of the model, one per turn, that earn the highest reward: text, or a message with tool calls. None
            if they are not known. Only ``slime doctor env`` plays them.
        data: for the environment.
    """

    prompt: list[Message]
    answer: str | None = None
    good: tuple[str | Message, ...] | None = None
    data: Any = None


@dataclass(frozen=True)
class Model:
    """The policy in one episode.

    Attributes:
        client: for environments that call the model themselves. Its key is the episode, so one client serves one
            episode. Parameters of sampling that a request names are ignored: the run decides about them.
    """

    client: AsyncOpenAI
    name: str = "policy"

    async def reply(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Message:
        """The next message of the policy, in the form in which it belongs into the history."""
        request: dict[str, Any] = {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
        answer = await self.client.chat.completions.create(model=self.name, **request)
        message: Message = answer.choices[0].message.model_dump(exclude_none=True)
        return message


class Environment(Protocol):
    """A number of tasks, and the episodes that are played on them.

    Several processes make their own object with the same options, and one object plays many episodes at once.

    Attributes:
        reward_range: lowest and highest reward.
    """

    reward_range: tuple[float, float]

    def __len__(self) -> int: ...

    def task(self, index: int) -> Task:
        """Task ``index``, the same one in every process and at every call."""
        ...

    async def play(self, task: Task, model: Model) -> float:
        """Play one episode, and return its reward.

        Raises an error of the model's client: the run tries the episode again.
        """
        ...


@dataclass(frozen=True)
class Adapter:
    """An environment of a package.

    Attributes:
        path: ``module:class``.
        package: module that is imported when an environment is loaded. Empty without one.
        extra: of this project's package, which installs it.
    """

    path: str
    package: str = ""
    extra: str = ""


_HERE = "slime.environments.adapters"
ADAPTERS = {
    "reasoning-gym": Adapter(f"{_HERE}:ReasoningGym", "reasoning_gym", "reasoning-gym"),
    "verifiers": Adapter(f"{_HERE}:Verifiers", "verifiers", "verifiers"),
    "mcp": Adapter(f"{_HERE}:McpTools", "mcp", "mcp"),
    "openenv": Adapter(f"{_HERE}:OpenEnv", "openenv", "openenv"),
    "nemo-gym": Adapter(f"{_HERE}:NemoGym"),
    "harbor": Adapter(f"{_HERE}:Harbor"),
}


def load(name: str, **options: Any) -> Environment:
    """The environment ``ADAPTER:REST`` of :data:`ADAPTERS`, or ``module:class`` of the user.

    Args:
        options: keyword arguments of the class. An adapter's first argument is REST.

    Raises:
        ConfigError: no such environment, its package is not installed, or the options do not fit.
    """
    kind, _, rest = name.partition(":")
    adapter = ADAPTERS.get(kind)
    try:
        if adapter is None:
            environment: Environment = load_function(name, "other")(**options)
            return environment
        _require(name, adapter)
        module, _, maker = adapter.path.partition(":")
        environment = vars(import_module(module))[maker](rest, **options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        given = json.dumps(options, default=str)
        raise ConfigError(f"environment {name} with the options {given}: {type(error).__name__}: {error}") from error
    return environment


def _require(name: str, adapter: Adapter) -> None:
    if not adapter.package:
        return
    try:
        import_module(adapter.package)
    except ImportError as error:
        raise ConfigError(
            f"environment {name} needs {adapter.package} ({error}): pip install 'slime[{adapter.extra}]'"
        ) from error


@dataclass
class Rows:
    """Tasks of a file, for environments to inherit from.

    Args:
        rows: the file: JSONL, Parquet, or another source of ``--prompt-data``.
    """

    rows: str
    wanted = "a row has prompt, label, and perhaps good, the right replies"
    """What :meth:`read` needs, for errors."""

    def __post_init__(self) -> None:
        self._tasks = []
        for place, row in numbered_rows(self.rows):
            try:
                self._tasks.append(self.read(row))
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise DataError(f"{place}: {self.wanted}: {error!r}") from error

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        return self._tasks[index]

    def read(self, row: dict[str, Any]) -> Task:
        """The task of a row. A missing or wrong field may raise any of Python's lookup, type and value errors."""
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Task(messages, str(row["label"]), right_replies(row.get("good")))


@dataclass(frozen=True)
class Step:
    """What follows a call of a tool, or a reply.

    Attributes:
        text: for the model.
        reward: of this step.
        is_last: the environment has ended the episode.
    """

    text: str
    reward: float = 0.0
    is_last: bool = False


Call = Callable[[str, dict[str, Any]], Awaitable[str | Step]]
"""Runs one tool, with its name and arguments, and returns the text for the model or a step."""


@dataclass(kw_only=True)
class Served:
    """Options of the environments of a server.

    Args:
        max_turns: replies of an episode.
        call_timeout: seconds for one answer of the server. Then the episode fails, and the run tries it again.
        reward_range: lowest and highest reward of an episode.
    """

    max_turns: int = 8
    call_timeout: float = 300.0
    reward_range: tuple[float, float] = (0.0, 1.0)


@dataclass(kw_only=True)
class Stepped(Served, abc.ABC):
    """Environments with observations and actions, to inherit from. Task ``i`` is the episode of seed ``i``.

    Args:
        action: field of an action that holds the reply of the policy. Without it the policy has tools.
        observation: field of an observation that the policy reads. Default: all fields, as JSON.
        answer: field of the state after a reset with the right reply or a list, one per turn, for ``slime doctor env``.
        size: number of tasks.

    Attributes:
        hidden: fields of observations that are not for the policy.
    """

    action: str = ""
    observation: str = ""
    answer: str = ""
    size: int = 1000
    hidden: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def first(self, seed: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The first observation and the state of an episode. Not called by the event loop of an episode."""

    @abc.abstractmethod
    def begun(self, seed: int) -> AbstractAsyncContextManager[tuple[Sequence[Message], Call]]:
        """An episode after its reset: the tools, and the function ``call`` of :func:`converse`.

        With ``action``, ``call`` gets an action of that field, and no name.
        """

    def seen(self, observation: Mapping[str, Any]) -> str:
        """The text of an observation for the policy."""
        fields = {name: value for name, value in observation.items() if name not in self.hidden}
        field = chosen(f"{self}: observation", fields, self.observation)
        return str(field) if self.observation else json.dumps(fields)

    def __len__(self) -> int:
        return self.size

    def task(self, index: int) -> Task:
        observation, state = self.first(index)
        known = right_replies(chosen(f"{self}: answer (of the state)", state, self.answer))
        prompt: list[Message] = [{"role": "user", "content": self.seen(observation)}]
        return Task(prompt, str(known[-1]) if known else None, known, index)

    async def play(self, task: Task, model: Model) -> float:
        async with self.begun(task.data) as (tools, call):
            say = (lambda text: call("", {self.action: text})) if self.action else None
            return (await converse(model, task.prompt, tools, call, max_turns=self.max_turns, say=say)).reward


def right_replies(known: Any) -> tuple[str | Message, ...] | None:
    """``Task.good`` of a value of a row or of an environment's state: one reply, or a list with one per turn."""
    replies = known if isinstance(known, list) else [] if known is None else [known]
    return tuple(reply if isinstance(reply, dict) else str(reply) for reply in replies) or None


def chosen(where: str, fields: Mapping[str, Any], name: str) -> Any:
    """The field that an option names. None if the option is empty.

    Raises:
        ConfigError: there is no such field.
    """
    if not name:
        return None
    if name not in fields:
        raise ConfigError(f"{where}: {name!r} is not one of its fields {', '.join(fields) or '(it has none)'}")
    return fields[name]


def same_text(text: str, label: str) -> bool:
    """A reward: whether the reply is the label."""
    return text.strip() == label.strip()


@dataclass
class Episode:
    """An episode that has ended.

    Attributes:
        messages: all of them, the prompt's included.
        text: the reply without a call that ended it, or "" without one.
        reward: the sum of all steps.
    """

    messages: list[Message]
    text: str = ""
    reward: float = 0.0


async def converse(
    model: Model,
    prompt: Sequence[Message],
    tools: Sequence[Message],
    call: Call,
    *,
    max_turns: int,
    say: Callable[[str], Awaitable[str | Step]] | None = None,
) -> Episode:
    """Let the model call tools until it replies without a call, or until a step is the last one.

    A call of an unknown tool, or with arguments that are not an object, is answered with its error.

    Args:
        call: runs one tool.
        say: answers a reply without a call with the next message of the user, so that such a reply does not end it.
    """
    episode = Episode(list(prompt))

    async def taken(answer: Awaitable[str | Step], message: Message) -> bool:
        """Append ``message`` with the text of the answer. Returns whether the episode goes on."""
        step = await answer
        step = Step(step) if isinstance(step, str) else step
        episode.reward += step.reward
        episode.messages.append(message | {"content": step.text})
        return not step.is_last

    for _ in range(max_turns):
        message = await model.reply(episode.messages, tools)
        episode.messages.append(message)
        if not message.get("tool_calls"):
            text = str(message.get("content") or "")
            if say is None:
                episode.text = text
                return episode
            if not await taken(say(text), {"role": "user"}):
                return episode
        for wanted in message.get("tool_calls") or ():
            answer = _called(wanted["function"], tools, call)
            if not await taken(answer, {"role": "tool", "tool_call_id": wanted["id"]}):
                return episode
    return episode


async def _called(function: dict[str, Any], tools: Sequence[Message], call: Call) -> str | Step:
    offered = [str(tool.get("function", tool).get("name")) for tool in tools]
    if function["name"] not in offered:
        return f"there is no such tool; the tools are {', '.join(offered)}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError as error:
        return f"the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "the arguments are not a JSON object"
    return await call(function["name"], arguments)


def as_tool(name: str, description: str | None, parameters: dict[str, Any]) -> Message:
    """A tool in OpenAI's format. ``parameters`` is a JSON schema."""
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def shell_tool(box: Sandbox, timeout: int) -> tuple[Message, Callable[[str, dict[str, Any]], Awaitable[str]]]:
    """The tool ``run``, which runs commands in a sandbox, and the function ``call`` of it for :func:`converse`.

    Args:
        timeout: seconds for one command.
    """
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}

    async def call(_: str, arguments: dict[str, Any]) -> str:
        command = arguments.get("command")
        if not isinstance(command, str):
            return "give the argument command, a string"
        # Not idempotent: sent again after a broken connection, it would run twice.
        try:
            code, out, err = await box.exec(command, timeout=timeout, idempotent=False)
        except DeadlineExceeded:
            return f"the command took more than {timeout} s"
        except CommandRefused as error:
            return str(error)
        text, half = f"exit code {code}\n{out}{err}", _MOST_OUTPUT // 2
        return text if len(text) <= _MOST_OUTPUT else f"{text[:half]}\n...\n{text[-half:]}"

    return as_tool("run", "Run a command in bash, and return its exit code and output.", schema), call


@contextmanager
def server_errors(server: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise a ConnectionError with the name of the server for errors of ``kinds``, alone or in a group.

    Of a group with another error, that one is raised.
    """
    expected: tuple[type[Exception], ...] = (ExceptionGroup, *kinds)
    try:
        yield
    except expected as error:
        found: Exception = error
        while isinstance(found, ExceptionGroup):
            if (episode := asyncio.current_task()) is not None and episode.cancelling():
                raise asyncio.CancelledError from error  # connections break while they are closed, and hide it
            found = found.exceptions[0]
        if isinstance(found, kinds):
            raise ConnectionError(f"{server}: {str(found) or type(found).__name__}") from error
        raise found from error
