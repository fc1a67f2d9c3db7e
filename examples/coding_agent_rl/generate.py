"""A coding agent works in a sandbox. A test in another, clean sandbox grades its changes.

    sample -> sandbox 1: the harness runs the agent's program -> adapter -> engine
                         git diff -> patch
              sandbox 2: git apply, the task's own files, its command -> reward 1 or 0
           <- loss-masked samples of everything that was said

    --custom-generate-function-path examples.coding_agent_rl.generate.generate
    --custom-config-path examples/coding_agent_rl/coding_agent.yaml

Metadata of a row (``--metadata-key``): ``image``, ``workdir`` (a git repository in it), ``eval_cmd``, which ends with 0
if the work is done, optional ``problem_statement`` in place of the prompt, and ``eval_files`` (path -> text), which
are written before the command runs, so that an agent cannot pass by changing the tests.
"""

from __future__ import annotations

import logging
import shlex
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from examples.coding_agent_rl.local_sandbox import LocalSandbox
from examples.coding_agent_rl.mini_harness import MiniHarness
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.adapters.common import BaseAdapter
from slime.agent.docker_sandbox import DockerSandbox
from slime.agent.harness import BaseHarness, ClaudeCodeHarness, CodexHarness
from slime.agent.sandbox import E2BSandbox, Sandbox
from slime.agent.service import AgentService, Outcome
from slime.data.sample import Sample
from slime.utils.errors import ConfigError, DataError, DeadlineExceeded

__all__ = ["HARNESSES", "SANDBOXES", "generate"]

logger = logging.getLogger(__name__)

HARNESSES: dict[str, tuple[type[BaseHarness], type[BaseAdapter]]] = {
    "claude_code": (ClaudeCodeHarness, AnthropicAdapter),
    "codex": (CodexHarness, OpenAIAdapter),
    "mini": (MiniHarness, AnthropicAdapter),
}
SANDBOXES: dict[str, Callable[[str], Sandbox]] = {
    # The agent in the container calls the adapter of this host.
    "docker": lambda image: DockerSandbox(image, run_args=("--network=host",)),
    "e2b": E2BSandbox,
    "local": LocalSandbox,
}
_REQUIRED = ("image", "workdir", "eval_cmd")


class _AdapterService(AgentService):
    """The adapter of this process, made by the first sample."""

    def __init__(self, args: Namespace) -> None:
        _, self.adapter_class = _choice(HARNESSES, "coding_harness", args.coding_harness)
        self.host, self.max_turns = args.coding_adapter_host, args.coding_max_turns
        self.max_running = args.coding_sandboxes
        super().__init__(args)


async def generate(
    args: Namespace, base_sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """One task. Conversations that do not continue each other become separate samples.

    Raises:
        ConfigError: a harness or a sandbox that does not exist.
        DataError: metadata that lacks a key of a task.
    """
    task = base_sample.metadata
    missing = [name for name in _REQUIRED if not task.get(name)]
    if missing:
        raise DataError(f"sample {base_sample.index}: its metadata lacks {', '.join(missing)} (--metadata-key)")
    service = _AdapterService(args)

    async def work(sid: str) -> Outcome:
        patch = await write_patch(args, base_sample, args.coding_adapter_url or service.url, sid)
        return await grade(args, task, patch), {"patch": patch}

    return await service.run(args, base_sample, sampling_params, work, evaluation=evaluation)


async def write_patch(args: Namespace, sample: Sample, url: str, sid: str) -> str:
    """The agent's changes as ``git diff`` shows them, also those of an agent that ran out of time."""
    task = sample.metadata
    harness = _choice(HARNESSES, "coding_harness", args.coding_harness)[0]()
    prompt = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt[-1]["content"])
    async with _sandbox(args, task) as sandbox:
        await harness.install_cli(sandbox)
        code = await harness.run(
            sandbox,
            workdir=task["workdir"],
            session_id=sid,
            adapter_url=url,
            time_budget_sec=args.coding_time_budget,
            prompt=task.get("problem_statement") or prompt,
        )
        if code != 0:
            logger.info("sample %s: the agent ended with %d", sample.index, code)
        # "git add" first: a diff alone leaves out new files. .harness holds the agent's program.
        diff = f"cd {shlex.quote(task['workdir'])} && git add -A -- . ':!.harness' && git diff --cached --binary HEAD"
        _, patch, _ = await sandbox.exec(diff, check=True)
        return patch


async def grade(args: Namespace, task: dict[str, Any], patch: str) -> float:
    """1 if ``eval_cmd`` succeeds on a clean copy with the patch, else 0."""
    if not patch:
        return 0.0
    place = shlex.quote(task["workdir"])
    async with _sandbox(args, task) as sandbox:
        await sandbox.write_file(f"{task['workdir']}/.harness/patch", patch)
        code, _, error = await sandbox.exec(f"cd {place} && git apply --whitespace=nowarn .harness/patch")
        if code != 0:
            logger.warning("a patch could not be applied: %s", error[-500:])
            return 0.0
        # After the patch, so that the task's tests replace those of the agent.
        for path, text in (task.get("eval_files") or {}).items():
            await sandbox.write_file(f"{task['workdir']}/{path}", text)
        try:
            code, _, _ = await sandbox.exec(f"cd {place} && ({task['eval_cmd']})", timeout=args.coding_eval_timeout)
        # An endless loop is a wrong answer, not a failed sample.
        except DeadlineExceeded:
            return 0.0
        return float(code == 0)


def _sandbox(args: Namespace, task: dict[str, Any]) -> Sandbox:
    return _choice(SANDBOXES, "coding_sandbox", args.coding_sandbox)(task["image"])


def _choice(known: dict[str, Any], setting: str, value: str) -> Any:
    if value not in known:
        raise ConfigError(f"{setting}: {value!r} is not one of {', '.join(known)}")
    return known[value]
