"""The rollout buffer service: generators write trajectories, rollouts take complete groups of them.

    python -m slime_plugins.rollout_buffer.buffer --port 8889

POST /start_rollout     {task_type, input_file, num_repeat_per_sample, ...}  a generator starts in the background
POST /buffer/write      {uid, instance_id, messages, reward, extra_info}     one trajectory
POST /get_rollout_data  {wait_s}                                            complete groups; waits for the first one

Requests are sent again when no reply comes: a trajectory with a ``uid`` that was written before counts once, and a
``start_id`` starts one generator.

Trajectories with the same ``instance_id`` are a group; it is complete with ``num_repeat_per_sample`` of them. The
service listens on the loopback address unless told otherwise: whoever reaches it can write what a model is trained on.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import pkgutil
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from slime_plugins.rollout_buffer import generator as generators

__all__ = [
    "RolloutBuffer",
    "default_get_group_data_meta_info",
    "default_is_valid_group",
    "default_transform_group",
    "discover_generators",
    "make_app",
]

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60.0

Item = dict[str, Any]


def default_is_valid_group(group: list[Item], min_size: int, task_type: str) -> bool:
    """Whether a group is complete."""
    return len(group) >= min_size


def default_transform_group(group: list[Item], task_type: str) -> list[Item]:
    """What is handed out for a complete group."""
    return group


def default_get_group_data_meta_info(temp_data: dict[Any, list[Item]]) -> dict[str, Any]:
    """Counts over complete groups, by instance. ``avg_reward`` where all rewards are numbers."""
    items = [item for group in temp_data.values() for item in group]
    meta: dict[str, Any] = {"total_samples": len(items), "num_groups": len(temp_data)}
    if temp_data:
        meta["avg_group_size"] = len(items) / len(temp_data)
    rewards = [item["reward"] for item in items]
    if rewards and all(isinstance(reward, int | float) for reward in rewards):
        meta["avg_reward"] = sum(rewards) / len(rewards)
    return meta


def discover_generators() -> dict[str, ModuleType]:
    """Task type -> module of ``generator/`` that has ``TASK_TYPE`` and ``run_rollout(data)``."""
    names = [info.name for info in pkgutil.iter_modules(generators.__path__)]
    modules = [importlib.import_module(f"{generators.__name__}.{name}") for name in names]
    return {module.TASK_TYPE: module for module in modules if hasattr(module, "run_rollout")}


class RolloutBuffer:
    """Trajectories by instance, until their group is complete and taken. Safe to use from several threads."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._groups: dict[Any, list[Item]] = {}
        self._written: set[str] = set()
        self._min_size = 1
        self._task_type = ""
        self._is_valid: Callable[[list[Item], int, str], bool] = default_is_valid_group
        self._transform: Callable[[list[Item], str], list[Item]] = default_transform_group
        self._describe: Callable[[dict[Any, list[Item]]], dict[str, Any]] = default_get_group_data_meta_info
        self._end = ""

    def configure(self, module: ModuleType, task_type: str, min_size: int) -> None:
        """What the generator of this task says about groups."""
        with self._change:
            self._min_size, self._task_type, self._end = min_size, task_type, ""
            self._written.clear()
            self._is_valid = getattr(module, "is_valid_group", default_is_valid_group)
            self._transform = getattr(module, "transform_group", default_transform_group)
            self._describe = getattr(module, "get_group_data_meta_info", default_get_group_data_meta_info)

    def write(self, item: Item) -> None:
        """Keep a trajectory. One with the ``uid`` of another is the same, sent again because no reply had come."""
        with self._change:
            if item.get("uid") is not None:
                if str(item["uid"]) in self._written:
                    return
                self._written.add(str(item["uid"]))
            self._groups.setdefault(item["instance_id"], []).append(item | {"written": time.time()})
            self._change.notify_all()

    def end(self, reason: str) -> None:
        """The generator ended; whoever waits is told why."""
        with self._change:
            self._end = reason
            self._change.notify_all()

    def take(self, wait_s: float) -> tuple[list[Item], dict[str, Any], str]:
        """(items of complete groups, counts, why the generator ended or ""); the items leave the buffer."""
        with self._change:
            self._change.wait_for(lambda: self._end or self._complete(), timeout=wait_s)
            complete = self._complete()
            taken = {key: self._transform(self._groups[key], self._task_type) for key in complete}
            meta = self._describe(taken)
            for key in complete:  # after the user's functions, which may raise
                del self._groups[key]
            items = [item for group in taken.values() for item in group]
            return items, meta | {"num_waiting_groups": len(self._groups)}, self._end

    def _complete(self) -> list[Any]:
        return [key for key, group in self._groups.items() if self._is_valid(group, self._min_size, self._task_type)]


def make_app(modules: dict[str, ModuleType] | None = None) -> FastAPI:
    """The service; ``modules`` are its generators, by default those of ``generator/``."""
    service, buffer = FastAPI(), RolloutBuffer()
    known = discover_generators() if modules is None else modules
    started: set[str] = set()

    @service.post("/start_rollout")
    def start_rollout(data: dict[str, Any]) -> dict[str, Any]:
        task_type = str(data.get("task_type", ""))
        if task_type not in known:
            return {"success": False, "message": f"task_type {task_type!r} is unknown; known are {sorted(known)}"}
        if "start_id" in data:
            if str(data["start_id"]) in started:  # sent again because no reply had come
                return {"success": True, "message": f"the generator of {task_type} has started already"}
            started.add(str(data["start_id"]))
        buffer.configure(known[task_type], task_type, int(data.get("num_repeat_per_sample", 1)))
        threading.Thread(target=_generate, args=(known[task_type], data, buffer), daemon=True).start()
        return {"success": True, "message": f"a generator of {task_type} started"}

    @service.post("/buffer/write")
    def write(item: dict[str, Any]) -> dict[str, Any]:
        missing = sorted({"instance_id", "messages", "reward"} - set(item))
        if missing:
            return {"success": False, "message": f"the item lacks {', '.join(missing)}"}
        buffer.write(item)
        return {"success": True, "message": "written"}

    @service.post("/get_rollout_data")
    async def get_rollout_data(request: dict[str, Any]) -> dict[str, Any]:
        wait_s = min(float(request.get("wait_s", 0.0)), _LONGEST_WAIT_S)
        items, meta, end = await run_in_threadpool(buffer.take, wait_s)
        message = end or ("" if items else "no complete group yet")
        return {"success": bool(items), "message": message, "data": {"data": items, "meta_info": meta}}

    return service


def _generate(module: ModuleType, data: dict[str, Any], buffer: RolloutBuffer) -> None:
    try:
        module.run_rollout(data)
    except Exception as error:  # the generator is the user's
        logger.exception("the generator ended")
        buffer.end(f"the generator ended with {type(error).__name__}: {error}")
    else:
        buffer.end("the generator ended: it has made all it was asked for")


def __getattr__(name: str) -> Any:
    if name == "app":  # made when a server asks for it, not at import
        return make_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8889)
    options = parser.parse_args()
    uvicorn.run(make_app(), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
