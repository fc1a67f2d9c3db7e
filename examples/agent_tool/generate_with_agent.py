"""An external program as the policy's body: it runs per sample, and thinks it talks to a server of OpenAI's kind.

    sample -> session of the adapter -> the program, with the session's id as its API key
              the program's requests -> chat template -> engine -> exact token ids, kept by the adapter
           <- loss-masked samples of everything that was said

    --custom-generate-function-path examples.agent_tool.generate_with_agent.generate
    --custom-config-path examples/agent_tool/agent_tool.yaml

Prompts stay messages (no ``--apply-chat-template``): the program makes its own. One execution may become several
samples (a list, with one ``rollout_id``) where its requests do not continue each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from argparse import Namespace
from typing import Any
from uuid import uuid4

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.errors import DataError, EngineError
from slime.utils.misc import SingletonMeta

__all__ = ["AdapterService", "generate", "run_program"]

_KILL_TIMEOUT_S = 5.0
_places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


class AdapterService(metaclass=SingletonMeta):
    """The adapter of this process, served on a thread of its own, made by the first sample."""

    def __init__(self, args: Namespace) -> None:
        self.adapter = OpenAIAdapter(
            tokenizer=GenerateState(args).tokenizer,
            sglang_url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
            tool_parser=args.sglang_tool_call_parser,
            reasoning_parser=args.sglang_reasoning_parser,
            max_turns_per_sid=args.agent_max_turns,
            needs_session=True,
            args=args,
        )
        self.server = run_app_in_thread(
            self.adapter.app, host="127.0.0.1", runner_kwargs={"handler_cancellation": True}
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/v1"


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Run the program for one sample; what it prints is the answer, and an exact match is rewarded.

    Raises:
        DataError: the prompt is a text.
        EngineError: the program ended without a turn to train on; slime tries again.
    """
    if not isinstance(sample.prompt, list):
        raise DataError(f"sample {sample.index}: the agent needs messages: drop --apply-chat-template")
    service = AdapterService(args)
    sid = uuid4().hex
    service.adapter.open_session(
        sid, sampling_defaults=sampling_params, max_context_tokens=args.rollout_max_context_len or 0
    )
    try:
        async with _place(args):
            answer = await run_program(args, str(sample.prompt[-1]["content"]), service.url, sid)
        if GenerateState(args).aborted:  # the rollout has its samples: the program was cut off, and begins anew
            await service.adapter.drop_session(sid, wait_timeout=0.0)
            sample.status = Sample.Status.ABORTED
            return sample
        reward = float(answer == str(sample.label))
        extra = sample.metadata | {"answer": answer}
        samples = await service.adapter.finish_session(sid, base_sample=sample, reward=reward, extra_metadata=extra)
    except BaseException:
        await service.adapter.drop_session(sid, wait_timeout=0.0)
        raise
    if not samples:
        raise EngineError(f"sample {sample.index}: the agent's program ended without a request")
    return samples[-1] if evaluation else samples


async def run_program(args: Namespace, question: str, url: str, sid: str) -> str | None:
    """What the program printed; None where it failed or ran out of time. It does not outlive this call."""
    environment = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": sid}
    program = await asyncio.create_subprocess_exec(
        *map(str, args.agent_command),
        question,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    try:
        output, _ = await asyncio.wait_for(program.communicate(), args.agent_timeout)
    except TimeoutError:
        return None
    finally:
        if program.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await asyncio.wait_for(program.wait(), _KILL_TIMEOUT_S)
    return output.decode(errors="replace").strip() if program.returncode == 0 else None


def _place(args: Namespace) -> asyncio.Semaphore:
    return _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(args.agent_processes))
