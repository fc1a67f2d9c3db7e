"""The adapter of a process, and one session per sample, for a generate function that runs an agent.

sample -> session -> the agent's program, with the session's id as its API key
          its requests -> chat template -> engine -> exact token ids, kept by the adapter
       <- loss-masked samples of the whole session

The adapter is an aiohttp application on a separate thread and event loop: agents' requests are answered while the
rollout's own loop does its work.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters.common import BaseAdapter
from slime.data.sample import Sample
from slime.observability.trace_utils import bind_trace, export_trace, import_trace
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import Slots
from slime.utils.errors import DeadlineExceeded, EngineError, kept
from slime.utils.misc import SingletonMeta

logger = logging.getLogger(__name__)

SLOW_REQUEST_S = 120.0
_STOP_TIMEOUT_S = 10.0


class FilteredAccessLogger(AbstractAccessLogger):
    """Logs errors and slow requests. Omits HEAD requests, and requests that returned 200 within two minutes."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.method == "HEAD" or (response.status == 200 and time <= SLOW_REQUEST_S):
            return
        self.logger.info("%s %s -> %d in %.1f s", request.method, request.path, response.status, time)


@dataclass
class AppHandle:
    """A running application."""

    host: str
    port: int
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner

    def stop(self) -> None:
        """Close sockets and end the thread. A second call has no effect."""
        if self.thread.is_alive() and self.loop.is_running():
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_STOP_TIMEOUT_S)


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    start_timeout_sec: float = 15.0,
    runner_kwargs: dict[str, Any] | None = None,
) -> AppHandle:
    """Serve ``app`` from a daemon thread. Returns when it listens.

    Args:
        host: this machine only. "0.0.0.0" for sandboxes on other machines: every machine can then connect.
        port: 0 takes a free one. The handle has the real number.
        runner_kwargs: of ``web.AppRunner``. ``{"handler_cancellation": True}`` ends the handlers of clients that left.

    Raises:
        DeadlineExceeded: it did not listen within ``start_timeout_sec`` seconds.
        Exception: the error of the start, such as OSError for a port in use.
    """
    loop = asyncio.new_event_loop()
    has_begun = threading.Event()
    failure: list[BaseException] = []
    runner = web.AppRunner(app, **({"access_log_class": FilteredAccessLogger} | (runner_kwargs or {})))

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        with kept(failure, BaseException):  # handed to the caller, who waits for it
            loop.run_until_complete(start())
        has_begun.set()
        try:
            if not failure:
                loop.run_forever()
            # On the same loop, because connections and tasks belong to it.
            loop.run_until_complete(runner.cleanup())
        finally:
            loop.close()

    thread = threading.Thread(target=serve, name=thread_name, daemon=True)
    thread.start()
    if not has_begun.wait(start_timeout_sec):
        loop.call_soon_threadsafe(loop.stop)
        raise DeadlineExceeded(f"the server {thread_name} did not listen on {host}:{port} in {start_timeout_sec} s")
    if failure:
        thread.join(_STOP_TIMEOUT_S)
        raise failure[0]
    return AppHandle(host, runner.addresses[0][1], thread, loop, runner)


Outcome = tuple[float, dict[str, Any]]
"""Reward, and entries for the metadata of the samples."""


class AgentService(metaclass=SingletonMeta):
    """An adapter that a thread serves. Subclass it once per kind of agent: each class has one instance.

    Attributes:
        adapter_class: the protocol that the agent speaks.
        host: address that the adapter listens on. Agents in sandboxes of other machines need ``0.0.0.0``.
        max_turns: requests that a session may make. None: any number.
        max_running: agents that run at a time. Further samples wait.
    """

    adapter_class: type[BaseAdapter] = OpenAIAdapter
    host: str = "127.0.0.1"
    max_turns: int | None = None
    max_running: int = 1024

    def __init__(self, args: Namespace) -> None:
        self.adapter = self.adapter_class(
            tokenizer=GenerateState(args).tokenizer,
            sglang_url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
            tool_parser=args.sglang_tool_call_parser,
            reasoning_parser=args.sglang_reasoning_parser,
            max_turns_per_sid=self.max_turns,
            needs_session=True,
            args=args,
        )
        self.slots = Slots(self.max_running)
        # Cancels the handler of a client that disconnected, which aborts its request at the engine.
        self.server = run_app_in_thread(self.adapter.app, host=self.host, runner_kwargs={"handler_cancellation": True})

    @property
    def url(self) -> str:
        """For programs on this machine, without ``/v1``."""
        return f"http://127.0.0.1:{self.server.port}"

    async def run(
        self,
        args: Namespace,
        sample: Sample,
        sampling_params: dict[str, Any],
        work: Callable[[str], Awaitable[Outcome]],
        *,
        evaluation: bool = False,
    ) -> Sample | list[Sample]:
        """Let ``work(session id)`` run the agent, and return the samples of its session.

        A rollout that ends meanwhile gives the sample back as ``ABORTED``: the agent begins anew in a later rollout.

        Raises:
            EngineError: the agent made no request. The rollout tries again.
        """
        adapter, sid = self.adapter, uuid4().hex
        handle = bind_trace(sample)
        adapter.open_session(
            sid,
            sampling_defaults=sampling_params,
            max_context_tokens=args.rollout_max_context_len or 0,
            # The adapter's thread knows nothing of the span that is open here.
            trace=import_trace(export_trace(handle), handle.carrier),
        )
        try:
            async with self.slots.semaphore:
                reward, metadata = await work(sid)
            if GenerateState(args).is_ending:
                await adapter.drop_session(sid, wait_timeout=0.0)
                sample.status = Sample.Status.ABORTED
                return sample
            extra = sample.metadata | metadata
            samples = await adapter.finish_session(sid, base_sample=sample, reward=reward, extra_metadata=extra)
        # CancelledError too: the session must not stay open.
        except BaseException:
            await adapter.drop_session(sid, wait_timeout=0.0)
            raise
        if not samples:
            raise EngineError(f"sample {sample.index}: the agent's program ended without a request")
        # An evaluation counts one sample per execution: the one with the last turns.
        return samples[-1] if evaluation else samples
