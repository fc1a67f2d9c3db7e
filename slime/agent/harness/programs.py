"""The harnesses of Claude Code and Codex.

    program      adapter                                     variables SLIME_AGENT_<NAME>_...
    Claude Code  slime.agent.adapters.AnthropicAdapter       CC
    Codex        slime.agent.adapters.OpenAIAdapter          CODEX, a version with chat completions

``SLIME_AGENT_NODE_TARBALL`` and ``..._TARBALL`` name files of this machine, ``..._EXTRA_ARGS`` has further words of the
command line, ``..._EXTRA_ENVS`` further variables as a JSON object.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import ClassVar

from slime.agent.harness.common import BaseHarness, HarnessContext, host_file, install_npm_cli, run_agent
from slime.agent.sandbox import AGENT_HOME, Sandbox

_PROGRAM = "/usr/local/bin/claude"
_CONFIG = json.dumps({"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True})


class NpmHarness(BaseHarness):
    """A program that is installed from a packed npm package.

    Attributes:
        check_cmd: command that shows that the program is installed.
    """

    check_cmd: ClassVar[str] = ""

    async def install_cli(self, sb: Sandbox) -> None:
        await install_npm_cli(
            sb,
            node_runtime=host_file(self.node_tarball_env),
            npm_package=host_file(self.cli_tarball_env),
            check_cmd=self.check_cmd,
        )


class ClaudeCodeHarness(NpmHarness):
    name: ClassVar[str] = "claude_code"
    check_cmd: ClassVar[str] = f"{_PROGRAM} --version"
    cli_tarball_env: ClassVar[str] = "SLIME_AGENT_CC_TARBALL"
    extra_args_env: ClassVar[str] = "SLIME_AGENT_CC_EXTRA_ARGS"
    extra_envs_env: ClassVar[str] = "SLIME_AGENT_CC_EXTRA_ENVS"
    # No user can answer a question about permission. The sandbox limits the agent.
    launch_flags: ClassVar[str | Sequence[str]] = (
        "--permission-mode bypassPermissions --output-format stream-json --include-partial-messages "
        "--include-hook-events --verbose"
    )
    static_env: ClassVar[Mapping[str, str]] = {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the answers to the questions of the first start."""
        await sb.exec(f"mkdir -p {AGENT_HOME}/.claude && chown agent:agent {AGENT_HOME}/.claude", check=True)
        for path in (f"{AGENT_HOME}/.claude.json", f"{AGENT_HOME}/.claude/settings.json"):
            await sb.write_file(path, _CONFIG, user="agent")

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        command = f"{_PROGRAM} -p {shlex.quote(prompt)} {self.launch_words()}".rstrip()
        env = self.environment(
            ANTHROPIC_BASE_URL=ctx.adapter_url, ANTHROPIC_AUTH_TOKEN=ctx.session_id, ANTHROPIC_MODEL=ctx.model_label
        )
        return await run_agent(sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=time_budget_sec)


_FOLDER = f"{AGENT_HOME}/.codex"


class CodexHarness(NpmHarness):
    name: ClassVar[str] = "codex"
    check_cmd: ClassVar[str] = "codex --version"
    cli_tarball_env: ClassVar[str] = "SLIME_AGENT_CODEX_TARBALL"
    extra_args_env: ClassVar[str] = "SLIME_AGENT_CODEX_EXTRA_ARGS"
    extra_envs_env: ClassVar[str] = "SLIME_AGENT_CODEX_EXTRA_ENVS"
    launch_flags: ClassVar[str | Sequence[str]] = "--skip-git-repo-check"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        # A JSON string is a TOML string as well; base64 keeps the shell out of it.
        provider = (
            f'{{ name = "slime", base_url = {json.dumps(ctx.adapter_url + "/v1")}, '
            'env_key = "OPENAI_API_KEY", wire_api = "chat" }'
        )
        config = (
            f'model = {json.dumps(ctx.model_label)}\nmodel_provider = "slime"\nmodel_providers.slime = {provider}\n'
        )
        encoded = base64.b64encode(config.encode()).decode()
        await sb.exec(
            f"mkdir -p {_FOLDER} && echo {encoded} | base64 -d > {_FOLDER}/config.toml && "
            f"chown -R agent:agent {_FOLDER}",
            check=True,
        )

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        command = " ".join(filter(None, ["codex exec", self.launch_words(), shlex.quote(prompt)]))
        env = self.environment(OPENAI_API_KEY=ctx.session_id, OPENAI_BASE_URL=f"{ctx.adapter_url}/v1")
        return await run_agent(sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=time_budget_sec)
