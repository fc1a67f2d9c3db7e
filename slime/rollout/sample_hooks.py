"""``--rollout-sample-hook-path``: users' hooks between generation and reward, applied to every sample in order."""

from __future__ import annotations

from typing import Any

from slime.data.sample import Sample
from slime.hooks.load import accepted_kwargs, load_function, name_of
from slime.rollout.base_types import complete_args
from slime.utils.async_utils import call_user

__all__ = ["apply_rollout_sample_hooks", "current_rollout_id", "set_current_rollout_id", "set_evaluated_rollout_id"]


_rollout_ids: dict[bool, int | None] = {False: None, True: None}
"""Whether it evaluates -> the id in this process. A rollout and an evaluation may run at the same time."""


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Called by the rollout manager before it generates."""
    _rollout_ids[False] = rollout_id


def set_evaluated_rollout_id(rollout_id: int | None) -> None:
    """Called by the rollout manager before it evaluates, possibly during a rollout."""
    _rollout_ids[True] = rollout_id


def current_rollout_id(evaluation: bool = False) -> int | None:
    own = _rollout_ids[evaluation]
    return _rollout_ids[False] if own is None else own  # such an evaluation belongs to the current rollout


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Apply every hook, in the order of the flags, to each sample in ``value``. The nesting is kept.

    Args:
        value: a sample or lists of them. Without hooks the same object is returned.
        kwargs: offered to the hooks. Each gets those that its signature accepts. ``rollout_id`` has a default.

    Raises:
        TypeError: a value that is not a sample or list, or a hook that returns neither a sample nor None.
    """
    paths = complete_args(args).rollout_sample_hook_path
    if not paths:
        return value
    kwargs.setdefault("rollout_id", current_rollout_id(bool(kwargs.get("evaluation"))))
    hooks = [load_function(path) for path in paths]

    async def apply(value: Any) -> Any:
        if isinstance(value, list):
            return [await apply(item) for item in value]
        if not isinstance(value, Sample):
            raise TypeError(f"sample hooks apply to a Sample or lists of them, got {type(value).__name__}")
        for hook in hooks:
            result = await call_user(hook, args, value, **accepted_kwargs(hook, kwargs))
            if result is None:
                continue
            if not isinstance(result, Sample):
                got = type(result).__name__
                raise TypeError(f"--rollout-sample-hook-path {name_of(hook)}: expected Sample or None, got {got}")
            value = result
        return value

    return await apply(value)
