"""Reading one flag from an ``args`` that may have been made by hand.

Public functions of this room are called by plugins and their tests with small namespaces. What such a namespace leaves
out has the default that the flag was declared with, and no other.
"""

from __future__ import annotations

from typing import Any

from slime.config.groups import flags_of
from slime.data.arguments import BatchSizeArgs, PromptDataArgs
from slime.rollout.arguments import EvalArgs, FilterArgs, GenerationArgs, RewardModelArgs

__all__ = ["setting"]

_GROUPS = (GenerationArgs, RewardModelArgs, FilterArgs, EvalArgs, PromptDataArgs, BatchSizeArgs)


_DEFAULTS = {flag.name: flag.default for flag in flags_of(_GROUPS)}


def setting(args: Any, name: str) -> Any:
    """``args.<name>``, or the declared default of that flag."""
    return getattr(args, name, _DEFAULTS[name])
