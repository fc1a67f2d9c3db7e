"""Environments: tasks, and an episode per task in which the policy answers and earns a reward.

One protocol for all of them. ``load("reasoning-gym:chain_sum")`` makes an environment of the table ``ADAPTERS``, whose
package is imported then. ``load("my_pkg.my_module:MyEnvironment")`` makes one of the user's.

    slime tasks NAME --output train.jsonl        the tasks as prompt data (``slime.environments.command``)
    slime doctor env NAME                        tests of the environment (``slime.doctor.environment_checks``)
    --prompt-data train.jsonl --custom-generate-function-path slime.environments.rollout.generate
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from openai import AsyncOpenAI

from slime.hooks.load import load_function
from slime.utils.errors import ConfigError

Message = dict[str, Any]
"""A message of OpenAI's chat format."""


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
    "harbor": Adapter("slime.environments.harbor:Harbor"),
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


class Over(Exception):
    """The environment has ended the episode. Raised by the functions that :func:`converse` calls."""


async def converse(
    model: Model,
    prompt: Sequence[Message],
    tools: Sequence[Message],
    call: Callable[[str, dict[str, Any]], Awaitable[str]],
    *,
    max_turns: int,
    say: Callable[[str], Awaitable[str]] | None = None,
    history: list[Message] | None = None,
) -> str:
    """Let the model call tools until it replies without a call. Returns that reply, or "" without one.

    Args:
        call: runs one tool, with its name and arguments, and returns the text for the model.
        say: answers a reply without a call with the next message of the user, so that such a reply does not end it.
        history: an empty list, which gets all messages of the episode.
    """
    messages = [] if history is None else history
    messages += prompt
    with suppress(Over):
        for _ in range(max_turns):
            message = await model.reply(messages, tools)
            messages.append(message)
            if not message.get("tool_calls"):
                text = str(message.get("content") or "")
                if say is None:
                    return text
                messages.append({"role": "user", "content": await say(text)})
            for wanted in message.get("tool_calls") or ():
                function = wanted["function"]
                try:
                    arguments = json.loads(function["arguments"] or "{}")
                    problem = "" if isinstance(arguments, dict) else "the arguments are not a JSON object"
                except json.JSONDecodeError as error:
                    problem = f"the arguments are not JSON: {error}"
                result = problem or await call(function["name"], arguments)
                messages.append({"role": "tool", "tool_call_id": wanted["id"], "content": result})
    return ""


def as_tool(name: str, description: str | None, parameters: dict[str, Any]) -> Message:
    """A tool in OpenAI's format. ``parameters`` is a JSON schema."""
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


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
