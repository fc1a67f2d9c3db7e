"""Reading one flag from an ``args``, or one fact from a state, that may have been made by hand.

Public functions of this room are called by plugins and their tests with small namespaces. What such a namespace leaves
out has the default that the flag was declared with, and no other.
"""

from __future__ import annotations

from typing import Any

from slime.config.groups import flags_of
from slime.data.arguments import BatchSizeArgs, PromptDataArgs
from slime.rollout.arguments import EvalArgs, FilterArgs, GenerationArgs, RewardModelArgs

__all__ = ["is_ending", "setting"]

_GROUPS = (GenerationArgs, RewardModelArgs, FilterArgs, EvalArgs, PromptDataArgs, BatchSizeArgs)


_DEFAULTS = {flag.name: flag.default for flag in flags_of(_GROUPS)}


def setting(args: Any, name: str) -> Any:
    """``args.<name>``, or the declared default of that flag."""
    return getattr(args, name, _DEFAULTS[name])


def is_ending(state: Any) -> bool:
    """Whether the rollout of a ``GenerateState`` is over. A state made by hand may have ``aborted`` only."""
    return bool(getattr(state, "is_ending", getattr(state, "aborted", False)))
