"""The resources that a Ray cluster lacks for waiting actors and placement groups.

Read by the waits of this room: ``waiting`` (actors) and ``placement_group``. The cluster may grow, so a shortage is a
reason to report and not to stop.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray._private.state import actors  # Ray has no public call for this without a dashboard
from ray.autoscaler.v2.sdk import get_cluster_status

__all__ = ["Reports", "Shortage", "shortage_of", "unplaced_of"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_GIB = 2**30
_WITHOUT_PROCESS = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")
_IN_BYTES = ("memory", "object_store_memory")


@dataclass
class Reports:
    """The times at which a wait is reported: within seconds, then every minute."""

    first_s: float = 5.0
    every_s: float = 60.0
    _started: float = field(default_factory=time.monotonic)
    _next_s: float | None = None

    def is_due(self) -> bool:
        elapsed = time.monotonic() - self._started
        due_s = self.first_s if self._next_s is None else self._next_s
        if elapsed < due_s:
            return False
        self._next_s = elapsed + self.every_s
        return True


@dataclass(frozen=True)
class Shortage:
    """Amounts by the name of the resource; memory in bytes.

    Attributes:
        asked: the sum of all waiting requests.
        total: all of the cluster.
        free: the unused part of it.
    """

    asked: Mapping[str, float]
    total: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def missing(self) -> list[str]:
        """Resources of which less is free than asked for."""
        return [name for name, amount in self.asked.items() if amount > self.free.get(name, 0.0)]

    @property
    def is_final(self) -> bool:
        """Whether the cluster as it is is too small for the request, also when it is idle."""
        return any(amount > self.total.get(name, 0.0) for name, amount in self.asked.items())

    def __str__(self) -> str:
        names = self.missing or list(self.asked)
        amounts = "; ".join(
            f"{name}: {_shown(name, self.asked[name])} asked for, {_shown(name, self.total.get(name, 0.0))} in the "
            f"cluster, {_shown(name, self.free.get(name, 0.0))} free"
            for name in sorted(names)
        )
        return amounts if self.missing else f"no node has enough of everything free ({amounts})"


def _shown(name: str, amount: float) -> str:
    return f"{amount / _GIB:.1f} GiB" if name in _IN_BYTES else f"{amount:g}"


def _or_none(ask: Callable[..., Answer]) -> Callable[..., Answer | None]:
    """A report must not end the wait that it is about: without an answer of Ray there is none."""

    @functools.wraps(ask)
    def asked(*arguments: Any) -> Answer | None:
        try:
            return ask(*arguments)
        except Exception as error:  # of Ray's own kinds, gRPC's and others
            logger.debug("Ray does not say what waits for a place: %s", error)
            return None

    return asked


@_or_none
def shortage_of(bundles: Iterable[Mapping[str, float]] | None = None) -> Shortage | None:
    """The shortage for ``bundles``, by default for all waiting requests of the cluster. None: there are none."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    if bundles is None:
        demands = status.resource_demands
        waiting = [*demands.placement_group_demand, *demands.ray_task_actor_demand]
        counted = [(part.bundle, part.count) for demand in waiting for part in demand.bundles_by_count]
    else:
        counted = [(bundle, 1) for bundle in bundles]
    asked: Counter[str] = Counter()
    for bundle, count in counted:
        asked.update({name: amount * count for name, amount in bundle.items() if "_group_" not in name})
    usage = {part.resource_name: part for part in status.cluster_resource_usage}
    total = {name: part.total for name, part in usage.items()}
    free = {name: part.total - part.used for name, part in usage.items()}
    return Shortage(asked, total, free) if asked else None


@_or_none
def unplaced_of(refs: Iterable[Any]) -> list[str]:
    """The kinds of the actors that work on ``refs`` and have no process yet, with their numbers: ``2 x TrainActor``."""
    found = [actors(actor_id) for actor_id in {ref.task_id().actor_id().hex() for ref in refs}]
    counts = Counter(actor["ActorClassName"] for actor in found if actor.get("State") in _WITHOUT_PROCESS)
    return [f"{count} x {name}" for name, count in sorted(counts.items())]
