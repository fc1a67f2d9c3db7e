"""Contract tests for users' functions: calls them as a run does, with small inputs, and checks their results.

    python -m slime.testing --custom-rm-path my_pkg.rewards.reward_func        or the flags of a whole train command

    from slime.testing import check_plugin
    assert check_plugin("--custom-rm-path", "my_pkg.rewards.reward_func") == []

Starts no engines: a small HTTP server in this process replaces them. Covers every hook of ``slime.hooks``.
"""

from slime.testing.run import Outcome, check_command, check_plugin

__all__ = ["Outcome", "check_command", "check_plugin"]
