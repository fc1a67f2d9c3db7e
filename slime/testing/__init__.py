"""Contract tests for users' functions: called as a run calls them, with small inputs, and what comes back is checked.

    python -m slime.testing --custom-rm-path my_pkg.rewards.reward_func        or the flags of a whole train command

    from slime.testing import check_plugin
    assert check_plugin("--custom-rm-path", "my_pkg.rewards.reward_func") == []

Nothing is started: engines are played by a small HTTP server in this process. Knows every hook of ``slime.hooks``.
"""

from slime.testing.run import Outcome, check_command, check_plugin

__all__ = ["Outcome", "check_command", "check_plugin"]
