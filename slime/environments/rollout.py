"""Episodes of environments in a run, and their tasks as rows of prompt data.

A row's metadata name environment, options and task. Rows of several environments may be mixed in one file.

    row ──▶ generate ──▶ Environment.play ──chat completions──▶ adapter of slime.agent ──token ids──▶ engine
            samples of all turns, with the reward of the episode ◀──┘
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from slime.agent.service import AgentService, Outcome
from slime.data.sample import Sample
from slime.environments import Environment, Model, Task, load
from slime.utils.errors import DataError

_KEY = "environment"
_loading = threading.Lock()
_MAX_RETRIES = 5  # the adapter answers 503 while engines get new weights


def rows(name: str, options: dict[str, Any], begin: int = 0, end: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows of prompt data for the tasks from ``begin`` to ``end``. Default: all."""
    environment = load(name, **options)
    for index in range(begin, len(environment) if end is None else min(end, len(environment))):
        task = environment.task(index)
        metadata = {_KEY: name, "options": options, "task": index}
        yield {"prompt": task.prompt, "label": task.answer, "metadata": metadata}


class EnvironmentService(AgentService):
    """The adapter of this process, made by the first sample."""


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Play the episode of one row. For ``--custom-generate-function-path``.

    Raises:
        DataError: the row is not one of :func:`rows`, or the environment has another task by now.
    """
    facts = sample.metadata
    if not {_KEY, "options", "task"} <= facts.keys():
        raise DataError(
            f"sample {sample.index}: its metadata name no task (keys: {', '.join(facts) or 'none'}): write the rows "
            "with slime tasks NAME, and leave --metadata-key at its default"
        )
    # In a thread: to load data or to make a task may take seconds, and the event loop serves all other samples.
    place = facts[_KEY], json.dumps(facts["options"], sort_keys=True), facts["task"]
    environment, task = await asyncio.to_thread(_task, *place)
    if task.prompt != sample.prompt:
        raise DataError(
            f"sample {sample.index}: task {facts['task']} of {facts[_KEY]} has another prompt than its row. Drop "
            "--apply-chat-template. If the package was updated, write the rows again with slime tasks"
        )
    service = EnvironmentService(args)

    async def work(sid: str) -> Outcome:
        # No timeout of the client's: a turn may wait for an engine. --custom-generate-timeout limits the episode.
        async with AsyncOpenAI(
            base_url=f"{service.url}/v1",
            api_key=sid,
            timeout=None,
            max_retries=_MAX_RETRIES,
            http_client=DefaultAsyncHttpxClient(trust_env=False),  # a proxy of the environment is for the outside
        ) as client:
            return await environment.play(task, Model(client)), {}

    return await service.run(args, sample, sampling_params, work, evaluation=evaluation)


def _task(name: str, options: str, index: int) -> tuple[Environment, Task]:
    with _loading:
        environment = _loaded(name, options)
    return environment, environment.task(index)


@functools.lru_cache(maxsize=64)
def _loaded(name: str, options: str) -> Environment:
    return load(name, **json.loads(options))
