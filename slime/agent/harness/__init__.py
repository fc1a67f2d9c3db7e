"""Agents' command-line programs, installed and run in a sandbox, pointed at an adapter."""

from slime.agent.harness.common import BaseHarness, HarnessContext
from slime.agent.harness.programs import ClaudeCodeHarness, CodexHarness

__all__ = ["BaseHarness", "ClaudeCodeHarness", "CodexHarness", "HarnessContext"]
