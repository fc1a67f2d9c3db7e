"""Environments of other packages. A class is loaded by its name in ``slime.environments.ADAPTERS``.

Each has at most 40 lines of code. ``__init__`` imports the package, after the table's check that it is installed.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from typing import Any
from unittest import mock

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
        reward: ``module:function`` of the last reply and the label. Default: 1 if both are the same text.
        max_turns: replies of an episode.
    """

    reward_range = (0.0, 1.0)

    def __init__(self, rows: str, command: Sequence[str], reward: str = "", max_turns: int = 8) -> None:
        self._rows = list(read_file(rows))
        self._program, *self._arguments = command
        if shutil.which(self._program) is None:
            raise ConfigError(f"mcp:{rows}: command: there is no program {self._program!r}")
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
        from mcp import ClientSession, StdioServerParameters, stdio_client

        server = StdioServerParameters(command=self._program, args=self._arguments)
        try:
            async with stdio_client(server) as streams, ClientSession(*streams) as session:
                await session.initialize()
                offered = [tool.model_dump(by_alias=True) for tool in (await session.list_tools()).tools]
                tools = [_as_function(tool["name"], tool["description"], tool["inputSchema"]) for tool in offered]

                async def call(name: str, arguments: dict[str, Any]) -> str:
                    result = await session.call_tool(name, arguments)
                    return "\n".join(part.text for part in result.content if part.type == "text")

                text = await converse(model, task.prompt, tools, call, max_turns=self._max_turns)
        except ExceptionGroup as group:
            if (episode := asyncio.current_task()) is not None and episode.cancelling():
                raise asyncio.CancelledError from group  # the streams break while they are closed, and hide it
            raise _first(group) from group
        return float(await asyncio.to_thread(self._grade, text, task.answer))


def _first(error: Exception) -> Exception:
    """The error inside groups of task groups."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


def _as_function(name: str, description: str | None, parameters: dict[str, Any]) -> Message:
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}
