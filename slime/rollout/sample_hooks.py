"""``--rollout-sample-hook-path``: users' hooks between generation and reward, applied to every sample in order."""

from __future__ import annotations

import threading
from typing import Any

from slime.data.sample import Sample
from slime.hooks.load import accepted_kwargs, load_function
from slime.rollout.base_types import complete_args
from slime.utils.async_utils import call_user

__all__ = ["apply_rollout_sample_hooks", "current_rollout_id", "set_current_rollout_id", "set_evaluated_rollout_id"]


class _Current:
    """The rollout id of this process. A rollout and an evaluation may run at the same time."""

    def __init__(self) -> None:
        # The thread of the manager writes, the thread of the event loop reads.
        self._lock = threading.Lock()
        self._rollout_ids: dict[bool, int] = {}

    def set(self, rollout_id: int | None, evaluation: bool) -> None:
        with self._lock:
            if rollout_id is None:
                self._rollout_ids.pop(evaluation, None)
            else:
                self._rollout_ids[evaluation] = rollout_id

    def get(self, evaluation: bool) -> int | None:
        with self._lock:
            # An evaluation without an id belongs to the current rollout.
            return self._rollout_ids.get(evaluation, self._rollout_ids.get(False))


_current = _Current()


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Called by the rollout manager before it generates."""
    _current.set(rollout_id, evaluation=False)


def set_evaluated_rollout_id(rollout_id: int | None) -> None:
    """Called by the rollout manager before it evaluates, possibly during a rollout."""
    _current.set(rollout_id, evaluation=True)


def current_rollout_id(evaluation: bool = False) -> int | None:
    return _current.get(evaluation)


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
    return await _apply(args, value, hooks, kwargs)


async def _apply(args: Any, value: Any, hooks: list[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [await _apply(args, item, hooks, kwargs) for item in value]
    if not isinstance(value, Sample):
        raise TypeError(f"sample hooks apply to a Sample or lists of them, got {type(value).__name__}")
    for hook in hooks:
        result = await call_user(hook, args, value, **accepted_kwargs(hook, kwargs))
        if result is None:
            continue
        if not isinstance(result, Sample):
            name = getattr(hook, "__qualname__", hook)
            raise TypeError(f"--rollout-sample-hook-path {name}: expected Sample or None, got {type(result).__name__}")
        value = result
    return value
