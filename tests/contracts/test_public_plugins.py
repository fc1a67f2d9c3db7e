"""The contracts of users' functions. They also check functions of a user's package.

    SLIME_CONTRACT_CUSTOM_RM_PATH=my_pkg.rewards.reward_func pytest tests/contracts/test_public_plugins.py

One variable per option: ``SLIME_CONTRACT_`` and its name in capitals. ``SLIME_CONTRACT_GROUP_RM=1`` adds --group-rm.
``SLIME_CONTRACT_FLAGS`` has further flags of the command. Without variables slime's own functions are checked.
"""

from __future__ import annotations

import os
import shlex

import pytest

from slime.hooks.protocols import HOOKS
from slime.testing import check_plugin

PREFIX = "SLIME_CONTRACT_"
OURS = {
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "custom_generate_function_path": "slime.rollout.sglang_streaming_rollout.generate_streaming",
    "custom_rm_path": "examples/custom_reward/custom_rm.py",
    "dynamic_sampling_filter_path": (
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
    ),
    "buffer_filter_path": "slime.rollout.data_source.pop_first",
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
}


def chosen(dest: str) -> str | None:
    is_users = any(name.startswith(PREFIX) and name.endswith("_PATH") for name in os.environ)
    return os.environ.get(PREFIX + dest.upper()) if is_users else OURS.get(dest)


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if chosen(hook.dest)], ids=lambda hook: hook.dest)
def test_the_function_of_an_option_keeps_its_contract(hook, tiny_task):
    flags = shlex.split(os.environ.get(PREFIX + "FLAGS", ""))
    if os.environ.get(PREFIX + "GROUP_RM") == "1":
        flags.append("--group-rm")
    if "--hf-checkpoint" not in flags:
        data = ["--prompt-data", tiny_task.train, "--label-key", "label", "--apply-chat-template"]
        flags += ["--hf-checkpoint", tiny_task.model, *data]
    assert check_plugin(hook.flag, chosen(hook.dest), *flags) == []
