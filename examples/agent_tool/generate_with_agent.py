"""An external program as the policy's body: it runs per sample, and thinks it talks to a server of OpenAI's kind.

    --custom-generate-function-path examples.agent_tool.generate_with_agent.generate
    --custom-config-path examples/agent_tool/agent_tool.yaml

Prompts stay messages (no ``--apply-chat-template``): the program makes its own. One execution may become several
samples (a list, with one ``rollout_id``) where its requests do not continue each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from argparse import Namespace
from typing import Any

from slime.agent.service import AgentService, Outcome
from slime.data.sample import Sample
from slime.utils.errors import DataError

__all__ = ["AdapterService", "generate", "run_program"]

_KILL_TIMEOUT_S = 5.0


class AdapterService(AgentService):
    """The adapter of this process, made by the first sample."""

    def __init__(self, args: Namespace) -> None:
        self.max_turns, self.max_running = args.agent_max_turns, args.agent_processes
        super().__init__(args)


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Run the program for one sample. Its output is the answer, and an exact match is rewarded.

    Raises:
        DataError: the prompt is a text.
        EngineError: the program ended without a turn to train on. slime retries.
    """
    if not isinstance(sample.prompt, list):
        raise DataError(f"sample {sample.index}: the agent needs messages: drop --apply-chat-template")
    question = str(sample.prompt[-1]["content"])
    service = AdapterService(args)

    async def work(sid: str) -> Outcome:
        answer = await run_program(args, question, f"{service.url}/v1", sid)
        return float(sample.label is not None and answer == str(sample.label)), {"answer": answer}

    return await service.run(args, sample, sampling_params, work, evaluation=evaluation)


async def run_program(args: Namespace, question: str, url: str, sid: str) -> str | None:
    """The output of the program. None if it failed or exceeded its time. The program ends with this call."""
    # The key is the id of the session: the adapter assigns requests to samples by it.
    environment = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": sid}
    program = await asyncio.create_subprocess_exec(
        *map(str, args.agent_command),
        question,
        # A program that reads stdin would otherwise wait for the terminal of the run.
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
        # Also when this task is cancelled: the program must not outlive its sample.
        if program.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await asyncio.wait_for(program.wait(), _KILL_TIMEOUT_S)
    return output.decode(errors="replace").strip() if program.returncode == 0 else None
