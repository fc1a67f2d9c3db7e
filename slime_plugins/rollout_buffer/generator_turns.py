"""One generator at a time, in a thread of the rollout buffer service.

A generator is a user's function and cannot be interrupted. A trainer that is started again finds the one of the
run before it. Its results are used, and when it ends (its work is done, or its engines are gone) the generator of the
new trainer makes the missing groups.
"""

from __future__ import annotations

import logging
import threading
from types import ModuleType
from typing import Any, Protocol

__all__ = ["GeneratorTurns", "Groups"]

logger = logging.getLogger(__name__)

# Payload keys that decide the instances and groups. A restarted trainer has the same values.
_OF_THE_TASK = ("task_type", "input_file", "num_repeat_per_sample")


class Groups(Protocol):
    """The interface of the ``RolloutBuffer`` to generators."""

    def clear(self) -> None: ...
    def configure(self, module: ModuleType, task_type: str, min_size: int) -> None: ...
    def begin_run(self, finished: Any) -> None: ...
    def made(self) -> list[str]: ...
    def end(self, reason: str) -> None: ...


class GeneratorTurns:
    """Starts generators, each after the one before it.

    Args:
        modules: task type -> module with ``run_rollout(data)``.
    """

    def __init__(self, modules: dict[str, ModuleType], groups: Groups) -> None:
        self._modules = modules
        self._groups = groups
        self._lock = threading.Lock()
        self._started: set[str] = set()
        self._last: dict[str, Any] = {}
        self._running = False
        self._next: dict[str, Any] | None = None

    def start(self, data: dict[str, Any]) -> tuple[bool, str]:
        """(success, message) of a ``/start_rollout`` with the payload ``data``."""
        task_type = str(data.get("task_type", ""))
        if task_type not in self._modules:
            return False, f"task_type {task_type!r} is unknown; known are {sorted(self._modules)}"
        with self._lock:
            if "start_id" in data and str(data["start_id"]) in self._started:  # sent again because no reply had come
                return True, f"the generator of {task_type} has started already"
            differs = [key for key in _OF_THE_TASK if self._last.get(key) != data.get(key)]
            if differs and self._running:
                return False, (
                    f"a generator with {differs[0]} {self._last.get(differs[0])!r} is still running, this one has "
                    f"{data.get(differs[0])!r}: try again when it has ended, or use a service of its own"
                )
            if differs:
                self._groups.clear()
            self._started.add(str(data.get("start_id")))
            self._groups.begin_run(data.get("skip_instance_ids") or [])
            if self._running:
                self._next = data
                return True, f"a generator of {task_type} is running; this one makes what is missing when that ends"
            self._begin(data)
            return True, f"a generator of {task_type} started"

    def _begin(self, data: dict[str, Any]) -> None:
        module, task_type = self._modules[data["task_type"]], data["task_type"]
        self._groups.configure(module, task_type, int(data.get("num_repeat_per_sample", 1)))
        self._last, self._running = data, True
        payload = data | {"skip_instance_ids": self._groups.made()}
        # A daemon: a generator is a user's function and cannot be interrupted.
        threading.Thread(target=self._generate, args=(module, payload), daemon=True).start()

    def _generate(self, module: ModuleType, data: dict[str, Any]) -> None:
        try:
            module.run_rollout(data)
        except Exception as error:  # the generator is the user's
            logger.exception("the generator ended")
            reason = f"the generator ended with {type(error).__name__}: {error}"
        else:
            reason = "the generator ended: it has made all it was asked for"
        with self._lock:
            self._running, waiting, self._next = False, self._next, None
            if waiting is None:
                self._groups.end(reason)
            else:
                self._begin(waiting)
