"""Where a rank's batch waits for its trainer (``--rollout-data-transport``), for the manager and for the ranks.

object-store   in Ray's shared memory; on another node, a copy of it
nixl           its tensors stay in the manager's memory, and NIXL moves them into the trainer's: RDMA where the
               network has it, else TCP or shared memory. The rest of the batch goes through the object store.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import ray

from slime.ray.shards import Box

__all__ = ["Transport", "actor_options", "boxed"]

Transport: TypeAlias = Literal["object-store", "nixl"]


def boxed(batch: dict[str, Any], transport: Transport) -> Box:
    """A reference to the batch. Called in an actor with :func:`actor_options`, and read in such actors."""
    return Box(ray.put(batch, _tensor_transport="nixl") if transport == "nixl" else ray.put(batch))


def actor_options(transport: Transport) -> dict[str, Any]:
    """What Ray must know of the actors that send and receive."""
    return {"enable_tensor_transport": True} if transport == "nixl" else {}
