"""The smallest harness: ``mini_agent.py``, which needs nothing but Python in the sandbox."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import ClassVar

from slime.agent.harness import BaseHarness, HarnessContext
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, Sandbox
from slime.utils.errors import DeadlineExceeded

__all__ = ["MiniHarness"]

_PROGRAM = ".harness/mini_agent.py"


class MiniHarness(BaseHarness):
    name: ClassVar[str] = "mini"

    async def install_cli(self, sb: Sandbox) -> None:
        """Nothing: :meth:`write_config` writes the program into the working directory."""

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        await sb.write_file(f"{ctx.workdir}/{_PROGRAM}", Path(__file__).with_name("mini_agent.py"))

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        command = f"cd {shlex.quote(ctx.workdir)} && python3 {_PROGRAM} {shlex.quote(prompt)}"
        env = {"ANTHROPIC_BASE_URL": ctx.adapter_url, "ANTHROPIC_AUTH_TOKEN": ctx.session_id}
        try:
            # idempotent=False: a retry after a connection error would run the agent twice.
            code, _, _ = await sb.exec(command, env=env, timeout=time_budget_sec, idempotent=False)
        except DeadlineExceeded:
            return EXIT_TIME_BUDGET_EXCEEDED
        return code

    async def run(
        self, sb: Sandbox, *, workdir: str, session_id: str, adapter_url: str, time_budget_sec: int, prompt: str
    ) -> int:
        """Like that of the base class, without a user ``agent``: this program works as any user."""
        ctx = HarnessContext(workdir, session_id, adapter_url.rstrip("/"))
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)
