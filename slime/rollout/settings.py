"""Reading one flag from an ``args`` that may have been made by hand.

Public functions of this room are called by plugins and their tests with small namespaces. What such a namespace leaves
out has the default that the flag was declared with, and no other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slime.data.arguments import BatchSizeArgs, PromptDataArgs
from slime.rollout.arguments import EvalArgs, FilterArgs, GenerationArgs, RewardModelArgs

__all__ = ["setting"]

_GROUPS = (GenerationArgs, RewardModelArgs, FilterArgs, EvalArgs, PromptDataArgs, BatchSizeArgs)


def _default(item: dataclasses.Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default


_DEFAULTS = {item.name: _default(item) for group in _GROUPS for item in dataclasses.fields(group)}


def setting(args: Any, name: str) -> Any:
    """``args.<name>``, or the declared default of that flag."""
    return getattr(args, name, _DEFAULTS[name])
