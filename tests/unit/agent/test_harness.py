"""The files that harnesses put into a sandbox, and the commands that they start."""

from __future__ import annotations

import asyncio
import base64
import lzma
import tomllib
from typing import ClassVar

import pytest

import slime.agent.harness
from slime.agent import sandbox
from slime.agent.harness import ClaudeCodeHarness, CodexHarness, HarnessContext
from slime.utils.errors import ConfigError

CTX = HarnessContext("/repo", "sid", "http://a:1")


class Recorder:
    """Remembers commands and files. ``answers`` maps a part of a command to its results, in order."""

    sandbox_id = "fake"

    def __init__(self, answers=None):
        self.commands, self.files, self.answers = [], {}, answers or {}

    async def exec(self, cmd, *, user="root", env=None, timeout=120, check=False, idempotent=True):
        self.commands.append((cmd, user, env))
        for part, results in self.answers.items():
            if part in cmd:
                return results.pop(0) if len(results) > 1 else results[0]
        return 0, "", ""

    async def write_file(self, path, content, *, user="root"):
        self.files[path] = content

    async def read_file(self, path, *, user="root"):
        return self.files[path]


DONE = {"test -f": [(0, "0\n", "")]}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    pauses = []

    async def note(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(slime.agent.harness.asyncio, "sleep", note)
    return pauses


def spawn_of(sb: Recorder):
    return next((cmd, user, env) for cmd, user, env in sb.commands if "setsid" in cmd)


def test_claude_code_is_configured_and_started_against_the_adapter(monkeypatch):
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ARGS", "--max-turns 3")
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", '{"ANTHROPIC_MODEL": "other", "N": 1}')
    sb = Recorder(DONE)
    code = asyncio.run(
        ClaudeCodeHarness().run(
            sb, workdir="/repo", session_id="sid", adapter_url="http://a:1/", time_budget_sec=5, prompt="it's time"
        )
    )
    assert code == 0
    assert "hasCompletedOnboarding" in sb.files["/home/agent/.claude.json"]
    assert "bypassPermissionsModeAccepted" in sb.files["/home/agent/.claude/settings.json"]
    launcher = sb.files["/tmp/.run.sh"]
    assert "/usr/local/bin/claude -p 'it'\"'\"'s time' --permission-mode bypassPermissions" in launcher
    assert launcher.rstrip().splitlines()[-3].endswith("--verbose --max-turns 3")
    spawn, user, env = spawn_of(sb)
    assert user == "agent"
    assert "/repo/.harness/trajectory.jsonl" in spawn
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_AUTH_TOKEN"]) == ("http://a:1", "sid")
    assert (env["ANTHROPIC_MODEL"], env["N"]) == ("other", "1"), "the user's variables come last"


def test_a_subclass_replaces_flags_and_variables_by_class_attributes(monkeypatch):
    class Quiet(ClaudeCodeHarness):
        launch_flags = ("--output-format", "json")
        static_env: ClassVar = {"CLAUDE_CODE_ATTRIBUTION_HEADER": "1", "ANTHROPIC_MODEL": "mine"}
        extra_args_env = "MY_ARGS"
        extra_envs_env = "MY_ENVS"
        node_tarball_env = "MY_NODE"

    assert ClaudeCodeHarness.name == "claude_code"
    monkeypatch.setenv("MY_ARGS", "--max-turns 3")
    monkeypatch.setenv("MY_ENVS", '{"N": 1}')
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ARGS", "--not-read")
    sb = Recorder(DONE)
    assert asyncio.run(Quiet().launch_and_wait(sb, CTX, "go", 5)) == 0
    assert "/usr/local/bin/claude -p go --output-format json --max-turns 3\n" in sb.files["/tmp/.run.sh"]
    _, _, env = spawn_of(sb)
    assert env == {
        "ANTHROPIC_BASE_URL": "http://a:1",
        "ANTHROPIC_AUTH_TOKEN": "sid",
        "ANTHROPIC_MODEL": "mine",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "1",
        "N": "1",
    }
    with pytest.raises(ConfigError, match="MY_NODE"):
        asyncio.run(Quiet().install_cli(Recorder()))


@pytest.mark.parametrize("wire_api", ["responses", "chat"])
def test_codex_is_configured_and_started_against_the_adapter(wire_api, monkeypatch):
    if wire_api != "responses":
        monkeypatch.setattr(CodexHarness, "wire_api", wire_api)
    sb = Recorder(DONE)
    asyncio.run(CodexHarness().write_config(sb, CTX))
    encoded = sb.commands[0][0].split("echo ")[1].split(" |")[0]
    config = tomllib.loads(base64.b64decode(encoded).decode())
    assert (config["model"], config["model_provider"]) == ("slime-actor", "slime")
    assert config["model_providers"]["slime"] == {
        "name": "slime",
        "base_url": "http://a:1/v1",
        "env_key": "OPENAI_API_KEY",
        "wire_api": wire_api,
    }
    assert asyncio.run(CodexHarness().launch_and_wait(sb, CTX, "do it", 5)) == 0
    assert "codex exec --skip-git-repo-check 'do it'" in sb.files["/tmp/.run.sh"]
    _, _, env = spawn_of(sb)
    assert env == {"OPENAI_API_KEY": "sid", "OPENAI_BASE_URL": "http://a:1/v1"}


def test_an_agent_that_runs_out_of_time_is_reported_as_such(monkeypatch):
    monkeypatch.setattr(sandbox, "_POLL_S", 1)
    sb = Recorder({"test -f": [(1, "", "")]})
    code = asyncio.run(slime.agent.harness.run_agent(sb, workdir="/repo", start_cmd="x", env={}, time_budget_sec=3))
    assert code == sandbox.EXIT_TIME_BUDGET_EXCEEDED


def test_a_program_is_installed_from_files_of_this_machine(tmp_path, monkeypatch, no_pauses):
    node, package = tmp_path / "node.tar.xz", tmp_path / "cli.tgz"
    node.write_bytes(lzma.compress(b"archive"))
    package.write_bytes(b"cli")
    monkeypatch.setattr(slime.agent.harness.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", str(node))
    monkeypatch.setenv("SLIME_AGENT_CC_TARBALL", str(package))
    sb = Recorder({"npm install": [(1, "", "no network"), (0, "", "")]})
    asyncio.run(ClaudeCodeHarness().install_cli(sb))
    assert sb.files["/tmp/harness-node.tar"].read_bytes() == b"archive"
    assert sb.files["/tmp/harness-cli.tgz"] == package
    assert no_pauses == [2]
    sb.files["/tmp/harness-node.tar"].parent.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by other users"):
        asyncio.run(ClaudeCodeHarness().install_cli(Recorder()))
    sb.files["/tmp/harness-node.tar"].parent.chmod(0o700)
    broken = Recorder({"npm install": [(1, "", "no network")]})
    with pytest.raises(RuntimeError, match=r"cli\.tgz failed 3 times: no network"):
        asyncio.run(ClaudeCodeHarness().install_cli(broken))


def test_missing_files_and_broken_variables_are_errors_with_their_names(monkeypatch):
    monkeypatch.delenv("SLIME_AGENT_NODE_TARBALL", raising=False)
    with pytest.raises(ConfigError, match="SLIME_AGENT_NODE_TARBALL"):
        asyncio.run(CodexHarness().install_cli(Recorder()))
    monkeypatch.setenv("SLIME_AGENT_CODEX_EXTRA_ENVS", "[1]")
    with pytest.raises(ConfigError, match="SLIME_AGENT_CODEX_EXTRA_ENVS"):
        asyncio.run(CodexHarness().launch_and_wait(Recorder(DONE), CTX, "x", 5))


def test_there_is_one_harness_of_a_kind():
    assert CodexHarness() is CodexHarness()
    assert CodexHarness() is not ClaudeCodeHarness()
