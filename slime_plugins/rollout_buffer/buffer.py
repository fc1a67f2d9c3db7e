"""The rollout buffer service: generators write trajectories, rollouts take complete groups of them.

    python -m slime_plugins.rollout_buffer.buffer --port 8889

POST /start_rollout     {task_type, input_file, num_repeat_per_sample, ...}  a generator starts in the background
POST /buffer/write      {uid, instance_id, messages, reward, extra_info}     one trajectory
POST /get_rollout_data  {wait_s, client, received}                          complete groups, waits for the first one

Requests are sent again when no reply comes, and each is made for that:

    /start_rollout     a ``start_id`` starts one generator. One generator runs at a time (``generator_turns``)
    /buffer/write      a trajectory with a ``uid`` that was written before counts once
    /get_rollout_data  ``client`` names the caller, ``received`` is the number of replies that it received. A reply is
                       kept until the client asks with a higher number. With the same number it is sent again. The next
                       ``/start_rollout``, of a trainer that was started again, puts its groups back. Without ``client``
                       groups are deleted once they are sent.

Trajectories with the same ``instance_id`` are a group. It is complete with ``num_repeat_per_sample`` of them. The
service listens on the loopback address by default: any client that reaches it can write training data.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import threading
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from slime_plugins.rollout_buffer import generator as generators
from slime_plugins.rollout_buffer.generator_turns import GeneratorTurns

__all__ = [
    "RolloutBuffer",
    "default_get_group_data_meta_info",
    "default_is_valid_group",
    "default_transform_group",
    "discover_generators",
    "make_app",
]

# Seconds that a request may wait for its first group.
_LONGEST_WAIT_S = 60.0

Item = dict[str, Any]


def default_is_valid_group(group: list[Item], min_size: int, task_type: str) -> bool:
    """Whether a group is complete."""
    return len(group) >= min_size


def default_transform_group(group: list[Item], task_type: str) -> list[Item]:
    """The reply for a complete group."""
    return group


def default_get_group_data_meta_info(temp_data: dict[Any, list[Item]]) -> dict[str, Any]:
    """Counts over complete groups, by instance. ``avg_reward`` if all rewards are numbers."""
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


class _Sent(NamedTuple):
    """A reply that its client may not have received.

    Attributes:
        received: replies that the client had received when it asked.
        groups: as they were written, by instance.
        items: those in the reply.
        meta: counts.
    """

    received: int
    groups: dict[Any, list[Item]]
    items: list[Item]
    meta: dict[str, Any]


class RolloutBuffer:
    """Trajectories by instance, until their group is complete and taken. Safe to use from several threads."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._groups: dict[Any, list[Item]] = {}
        self._sent: dict[str, _Sent] = {}
        self._taken: set[str] = set()
        self._written: set[str] = set()
        self._num_runs = 0
        self._min_size = 1
        self._task_type = ""
        self._is_valid: Callable[[list[Item], int, str], bool] = default_is_valid_group
        self._transform: Callable[[list[Item], str], list[Item]] = default_transform_group
        self._describe: Callable[[dict[Any, list[Item]]], dict[str, Any]] = default_get_group_data_meta_info
        self._end = ""

    def configure(self, module: ModuleType, task_type: str, min_size: int) -> None:
        """Use the rules of ``module`` for groups. Incomplete groups are deleted."""
        with self._change:
            self._min_size, self._task_type, self._end = min_size, task_type, ""
            self._written.clear()
            self._is_valid = getattr(module, "is_valid_group", default_is_valid_group)
            self._transform = getattr(module, "transform_group", default_transform_group)
            self._describe = getattr(module, "get_group_data_meta_info", default_get_group_data_meta_info)
            # The generator begins now and makes incomplete groups from the start.
            self._groups = {key: self._groups[key] for key in self._complete()}

    def clear(self) -> None:
        """Forget all groups: the next generator has other instances."""
        with self._change:
            self._groups.clear()
            self._sent.clear()

    def begin_run(self, finished: Iterable[Any]) -> None:
        """Give the groups of unconfirmed replies to a new trainer, except the ``finished`` instances. End all waits."""
        with self._change:
            self._num_runs += 1
            for sent in self._sent.values():
                self._groups = sent.groups | self._groups
            self._sent.clear()
            self._taken = set(map(str, finished))
            self._groups = {key: group for key, group in self._groups.items() if str(key) not in self._taken}
            # Requests of the trainer before this one must not wait any longer.
            self._change.notify_all()

    def made(self) -> list[str]:
        """Instances that the trainer has finished, was sent, or can take."""
        with self._change:
            return sorted(self._taken | {str(key) for key in self._complete()})

    def write(self, item: Item) -> None:
        """Keep a trajectory. A second one with the same ``uid`` is ignored."""
        with self._change:
            if item.get("uid") is not None:
                # Sent again because no reply had come.
                if str(item["uid"]) in self._written:
                    return
                self._written.add(str(item["uid"]))
            self._groups.setdefault(item["instance_id"], []).append(item | {"written": time.time()})
            self._change.notify_all()

    def end(self, reason: str) -> None:
        """Note the end of the generator, with its reason for waiting trainers."""
        with self._change:
            self._end = reason
            self._change.notify_all()

    def take(
        self, wait_s: float, client: str | None = None, received: int = 0
    ) -> tuple[list[Item], dict[str, Any], str]:
        """(items of complete groups, counts, why the generator ended or ""). The items leave the buffer.

        Args:
            client: the caller. The items are kept until it asks again with a higher ``received``.
        """
        with self._change:
            run = self._num_runs
            if client in self._sent and self._sent[client].received != received:
                # The client has received this reply.
                del self._sent[client]
            self._change.wait_for(
                lambda: client in self._sent or run != self._num_runs or self._end or self._complete(), timeout=wait_s
            )
            if client in self._sent:  # also where an earlier attempt of this request has waited beside it
                sent = self._sent[client]
            elif run != self._num_runs:
                # Another trainer began while this request waited. The groups belong to that trainer.
                sent = _Sent(received, {}, [], self._describe({}))
            else:
                sent = self._take_complete(client, received)
            return sent.items, sent.meta | {"num_waiting_groups": len(self._groups)}, self._end

    def _take_complete(self, client: str | None, received: int) -> _Sent:
        groups = {key: self._groups[key] for key in self._complete()}
        taken = {key: self._transform(group, self._task_type) for key, group in groups.items()}
        items = [item for group in taken.values() for item in group]
        sent = _Sent(received, groups, items, self._describe(taken))
        for key in groups:  # after the user's functions, which may raise
            del self._groups[key]
            self._taken.add(str(key))
        if client is not None and groups:
            self._sent[client] = sent
        return sent

    def _complete(self) -> list[Any]:
        return [key for key, group in self._groups.items() if self._is_valid(group, self._min_size, self._task_type)]


def make_app(modules: dict[str, ModuleType] | None = None) -> FastAPI:
    """The service. ``modules`` are its generators, by default those of ``generator/``."""
    service, buffer = FastAPI(), RolloutBuffer()
    turns = GeneratorTurns(discover_generators() if modules is None else modules, buffer)

    @service.post("/start_rollout")
    def start_rollout(data: dict[str, Any]) -> dict[str, Any]:
        success, message = turns.start(data)
        return {"success": success, "message": message}

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
        client, received = request.get("client"), int(request.get("received", 0))
        items, meta, end = await run_in_threadpool(buffer.take, wait_s, client, received)
        message = end or ("" if items else "no complete group yet")
        return {"success": bool(items), "message": message, "data": {"data": items, "meta_info": meta}}

    return service


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
