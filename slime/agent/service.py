"""The adapter of a process, and one session per sample, for a generate function that runs an agent.

sample -> session -> the agent's program, with the session's id as its API key
          its requests -> chat template -> engine -> exact token ids, kept by the adapter
       <- loss-masked samples of the whole session
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters.common import BaseAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.data.sample import Sample
from slime.observability.trace_utils import bind_trace, export_trace, import_trace
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import Slots
from slime.utils.errors import EngineError
from slime.utils.misc import SingletonMeta

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
