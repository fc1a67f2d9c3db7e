"""Agents' command-line programs, installed and run in a sandbox, pointed at an adapter."""

from slime.agent.harness.common import BaseHarness, ClaudeCodeHarness, CodexHarness, HarnessContext

__all__ = ["BaseHarness", "ClaudeCodeHarness", "CodexHarness", "HarnessContext"]
