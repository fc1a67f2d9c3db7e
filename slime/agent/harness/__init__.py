"""Harnesses: prepare the sandbox, configure the program, run it within a time budget. Claude Code, Codex, a base."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import lzma
import os
import shlex
import shutil
import tempfile
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from slime.agent import sandbox
from slime.agent.sandbox import AGENT_HOME, Sandbox
from slime.utils.errors import ConfigError
from slime.utils.files import is_private_directory, replacing
from slime.utils.misc import SingletonMeta

NPM_INSTALL_RETRIES = 3
NPM_INSTALL_BACKOFF_SEC = 2
_NPM_TIMEOUT_S = 300
_CLI_TARBALL = "/tmp/harness-cli.tgz"
_NODE_TARBALL = "/tmp/harness-node.tar"


class SingletonABCMeta(SingletonMeta, ABCMeta):
    """One instance per class, of classes with abstract methods."""


@dataclass(frozen=True)
class HarnessContext:
    """One run: its folder, its session, and the server of the model."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class BaseHarness(ABC, metaclass=SingletonABCMeta):
    """An agent's program. Call ``install_cli`` once per sandbox, then ``run``. Subclasses may set the class attributes.

    Attributes:
        node_tarball_env, cli_tarball_env: variables that name files of this machine, for ``install_cli``.
        extra_args_env: variable with further words of the command line.
        extra_envs_env: variable with further variables of the program, as a JSON object. They override ``static_env``.
        launch_flags: flags of the program, as shell text or as words.
        static_env: variables of the program that are the same in every run.
    """

    name: ClassVar[str] = ""
    node_tarball_env: ClassVar[str] = "SLIME_AGENT_NODE_TARBALL"
    cli_tarball_env: ClassVar[str] = ""
    extra_args_env: ClassVar[str] = ""
    extra_envs_env: ClassVar[str] = ""
    launch_flags: ClassVar[str | Sequence[str]] = ""
    static_env: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    async def install_cli(self, sb: Sandbox) -> None: ...

    @abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None: ...

    @abstractmethod
    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Exit code of the program, or ``EXIT_TIME_BUDGET_EXCEEDED``."""

    async def run(
        self, sb: Sandbox, *, workdir: str, session_id: str, adapter_url: str, time_budget_sec: int, prompt: str
    ) -> int:
        """Let the agent work on ``prompt`` in ``workdir``. See :meth:`launch_and_wait`."""
        ctx = HarnessContext(workdir, session_id, adapter_url.rstrip("/"))
        await sandbox.ensure_agent_user(sb, workdir)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)

    def launch_words(self) -> str:
        """``launch_flags`` and the words of ``extra_args_env``, as shell text."""
        flags = self.launch_flags if isinstance(self.launch_flags, str) else shlex.join(self.launch_flags)
        return " ".join(filter(None, [flags, os.environ.get(self.extra_args_env, "")]))

    def environment(self, **variables: str) -> dict[str, str]:
        """``variables`` of a run, ``static_env``, then those of ``extra_envs_env``. Later values replace earlier ones.

        Raises:
            ConfigError: the variable holds no JSON object.
        """
        text = os.environ.get(self.extra_envs_env, "")
        try:
            extra = json.loads(text or "{}")
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise ConfigError(f'{self.extra_envs_env}={text!r} must be a JSON object such as {{"NAME": "value"}}')
        return variables | dict(self.static_env) | {name: str(value) for name, value in extra.items()}


async def run_agent(sb: Sandbox, *, workdir: str, start_cmd: str, env: dict[str, str], time_budget_sec: int) -> int:
    """Run ``start_cmd`` as user ``agent``, with its output in ``{workdir}/.harness/trajectory.jsonl``."""
    folder = f"{workdir}/.harness"
    place = shlex.quote(folder)
    # The folder is created by root, and the agent writes into it.
    await sb.exec(f"mkdir -p {place} && chown agent:agent {place}", check=True)
    code, _ = await sandbox.exec_and_wait(
        sb,
        cmd=start_cmd,
        time_budget_sec=time_budget_sec,
        tag="run",
        user="agent",
        env=env,
        workdir=workdir,
        out_file=f"{folder}/trajectory.jsonl",
    )
    return code


async def install_npm_cli(sb: Sandbox, *, node_runtime: Path, npm_package: Path, check_cmd: str) -> None:
    """Install Node and a packed npm program from files of this machine, then run ``check_cmd``.

    Raises:
        RuntimeError: three attempts failed. The message has the end of npm's output.
    """
    await install_node22(sb, node_runtime)
    await sb.write_file(_CLI_TARBALL, npm_package)
    problem = ""
    for attempt in range(1, NPM_INSTALL_RETRIES + 1):
        code, out, err = await sb.exec(
            f"npm install -g --no-audit --no-fund {_CLI_TARBALL} && {check_cmd}", timeout=_NPM_TIMEOUT_S
        )
        if code == 0:
            return
        problem = (err or out)[-500:]
        if attempt < NPM_INSTALL_RETRIES:
            await asyncio.sleep(NPM_INSTALL_BACKOFF_SEC * attempt)
    raise RuntimeError(f"npm install of {npm_package.name} failed {NPM_INSTALL_RETRIES} times: {problem}")


async def install_node22(sb: Sandbox, host_tarball: Path) -> None:
    """Unpack Node into ``/usr/local`` of the sandbox. Images without xz get the archive decompressed."""
    tarball = _decompressed(host_tarball) if host_tarball.suffix == ".xz" else host_tarball
    await sb.write_file(_NODE_TARBALL, tarball)
    await sb.exec(
        f"tar -xf {_NODE_TARBALL} -C /usr/local --strip-components=1 && rm {_NODE_TARBALL} && node --version",
        check=True,
        timeout=_NPM_TIMEOUT_S,
    )


def _decompressed(tarball: Path) -> Path:
    """The archive without xz, in a private temporary directory, made once per version of the file.

    Raises:
        ConfigError: another user made that directory.
    """
    stat = tarball.stat()
    # Size and time: a new version of the file under the same name gets another archive.
    key = hashlib.sha1(f"{tarball.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    directory = Path(tempfile.gettempdir()) / f"slime-{os.getuid()}"
    if not is_private_directory(directory):  # the archive is unpacked into every sandbox
        raise ConfigError(f"{directory} can be written by other users: delete it, or set TMPDIR to another place")
    target = directory / f"{tarball.stem}-{key}.tar"
    if not target.exists():
        with replacing(target) as partial, lzma.open(tarball) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def host_file(variable: str) -> Path:
    """The file that an environment variable names.

    Raises:
        ConfigError: the variable is not set, or the file is missing.
    """
    value = os.environ.get(variable, "")
    if not value or not Path(value).is_file():
        raise ConfigError(f"{variable}={value!r} must name a file on this machine that is copied into the sandbox")
    return Path(value)


#     program      adapter                                     variables SLIME_AGENT_<NAME>_...
#     Claude Code  slime.agent.adapters.AnthropicAdapter       CC
#     Codex        slime.agent.adapters.OpenAIAdapter          CODEX
#
# ``SLIME_AGENT_NODE_TARBALL`` and ``..._TARBALL`` name files of this machine, ``..._EXTRA_ARGS`` has further words of
# the command line, ``..._EXTRA_ENVS`` further variables as a JSON object.

_PROGRAM = "/usr/local/bin/claude"
_CONFIG = json.dumps({"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True})


class NpmHarness(BaseHarness):
    """A program that is installed from a packed npm package, and started by one command.

    Attributes:
        check_cmd: command that shows that the program is installed.
    """

    check_cmd: ClassVar[str] = ""

    @abstractmethod
    def start(self, ctx: HarnessContext, prompt: str) -> tuple[str, dict[str, str]]:
        """The command that works on ``prompt``, which is quoted, and the variables with the model's server and key."""

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        command, variables = self.start(ctx, shlex.quote(prompt))
        env = self.environment(**variables)
        return await run_agent(sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=time_budget_sec)

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

    def start(self, ctx: HarnessContext, prompt: str) -> tuple[str, dict[str, str]]:
        server, key = {"ANTHROPIC_BASE_URL": ctx.adapter_url}, {"ANTHROPIC_AUTH_TOKEN": ctx.session_id}
        variables = server | key | {"ANTHROPIC_MODEL": ctx.model_label}
        return f"{_PROGRAM} -p {prompt} {self.launch_words()}".rstrip(), variables


_FOLDER = f"{AGENT_HOME}/.codex"


class CodexHarness(NpmHarness):
    """``wire_api`` is the protocol: ``responses``, or ``chat``, which newer versions of Codex refuse."""

    name: ClassVar[str] = "codex"
    check_cmd: ClassVar[str] = "codex --version"
    cli_tarball_env: ClassVar[str] = "SLIME_AGENT_CODEX_TARBALL"
    extra_args_env: ClassVar[str] = "SLIME_AGENT_CODEX_EXTRA_ARGS"
    extra_envs_env: ClassVar[str] = "SLIME_AGENT_CODEX_EXTRA_ENVS"
    launch_flags: ClassVar[str | Sequence[str]] = "--skip-git-repo-check"
    wire_api: ClassVar[str] = "responses"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        # A JSON string is a TOML string as well; base64 keeps the shell out of it.
        provider = (
            f'{{ name = "slime", base_url = {json.dumps(ctx.adapter_url + "/v1")}, '
            f'env_key = "OPENAI_API_KEY", wire_api = "{self.wire_api}" }}'
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

    def start(self, ctx: HarnessContext, prompt: str) -> tuple[str, dict[str, str]]:
        variables = {"OPENAI_API_KEY": ctx.session_id, "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1"}
        return " ".join(filter(None, ["codex exec", self.launch_words(), prompt])), variables
