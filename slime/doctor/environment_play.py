"""Episodes with a scripted model, for :mod:`slime.doctor.environment_checks`. No engine and no network."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from slime.environments import Environment, Message, Model, Task

MAX_TURNS = 100
CANCEL_S = 5.0
_LOOK_S = 0.25
_LOOKS = 4


@dataclass
class Played:
    """One episode.

    Attributes:
        reward: returned by ``play``, whatever its type.
        error: raised by ``play``. None if it returned.
        requests: bodies of the requests to the model, in their order.
        is_late: it did not return in time and was cancelled.
        is_stuck: it did not end after it was cancelled either.
        has_changed_task: it changed the task in place.
    """

    reward: Any = None
    error: BaseException | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    is_late: bool = False
    is_stuck: bool = False
    has_changed_task: bool = False

    @property
    def is_number(self) -> bool:
        return isinstance(self.reward, int | float)


class Script:
    """A model that gives ``replies`` in order, and repeats the last one.

    Args:
        fails: every request is answered with the status 500.
        gate: waited for before the first reply.
    """

    def __init__(
        self, replies: Sequence[str | Message], *, fails: bool = False, gate: Gate | None = None, hangs: bool = False
    ) -> None:
        self.replies, self.fails, self.gate, self.hangs = list(replies), fails, gate, hangs
        self.requests: list[dict[str, Any]] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append(body)
        if self.hangs:
            await asyncio.Event().wait()
        if self.gate is not None and len(self.requests) == 1:
            await self.gate.wait()
        if self.fails:
            return httpx.Response(500, json={"error": {"message": "the model fails on purpose"}})
        if len(self.requests) > MAX_TURNS:
            return httpx.Response(400, json={"error": {"message": f"more than {MAX_TURNS} turns"}})
        number = len(self.requests) - 1
        reply = self.replies[min(number, len(self.replies) - 1)]
        message = {"role": "assistant", **({"content": reply} if isinstance(reply, str) else reply)}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": "policy"}
        return httpx.Response(200, json={**head, "choices": [choice], "usage": usage})


class Gate:
    """Holds each episode at its first request until ``count`` of them wait there, or it has waited ``patience_s``.

    Attributes:
        most: episodes that waited at the same time.
    """

    def __init__(self, count: int, patience_s: float) -> None:
        self.count, self.patience_s, self.most, self._waiting = count, patience_s, 0, 0
        self._open = asyncio.Event()

    async def wait(self) -> None:
        self._waiting += 1
        self.most = max(self.most, self._waiting)
        if self._waiting >= self.count:
            self._open.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._open.wait(), self.patience_s)
        self._open.set()
        self._waiting -= 1


async def play(environment: Environment, task: Task, script: Script, timeout_s: float) -> Played:
    """Play one episode. Never raises an error of the environment."""
    before = copy.deepcopy(task)
    transport = httpx.MockTransport(script.answer)
    async with httpx.AsyncClient(transport=transport) as http:
        client = AsyncOpenAI(base_url="http://script/v1", api_key="doctor", max_retries=0, http_client=http)
        episode = asyncio.ensure_future(environment.play(task, Model(client)))
        done, _ = await asyncio.wait([episode], timeout=timeout_s)
        played = Played(requests=script.requests, is_late=not done)
        if not done:
            episode.cancel()
            done, _ = await asyncio.wait([episode], timeout=CANCEL_S)
            played.is_stuck = not done
            if done and not episode.cancelled():
                episode.exception()  # asyncio logs errors that were not asked for
        elif episode.cancelled():
            played.error = asyncio.CancelledError("the episode cancelled itself")
        elif episode.exception() is not None:
            played.error = episode.exception()
        else:
            played.reward = episode.result()
    played.has_changed_task = task != before
    return played


@contextlib.contextmanager
def watch_loop() -> Iterator[list[str]]:
    """Yield a list that receives the place in the code that kept the event loop of this thread from running.

    A place is listed after four looks in a row, a quarter of a second apart, without a beat of the loop. The looks
    count, and not the clock: on a busy machine they become rarer as well.
    """
    loop, thread, ended = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
    beats, found = itertools.count(1), [""]
    last = [0]

    def beat() -> None:
        last[0] = next(beats)
        if not ended.is_set():
            loop.call_later(_LOOK_S / 5, beat)

    def look() -> None:
        seen, looks = last[0], 0
        while not ended.wait(_LOOK_S):
            seen, looks = last[0], looks + 1 if last[0] == seen else 0
            if looks >= _LOOKS and not found[0]:
                frames = traceback.extract_stack(sys._current_frames()[thread])
                found[0] = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})"

    places: list[str] = []
    beat()
    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield places
    finally:
        ended.set()
        watcher.join()
        places += filter(None, found)
