"""Transport of a rollout's data to the trainer: one object-store reference per data-parallel rank, never by value."""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ray

from slime.config.arguments import ClusterArgs
from slime.config.groups import from_args
from slime.data.sample import Sample
from slime.observability.sample_record import Example
from slime.utils.errors import DataError


@dataclass(frozen=True)
class Box:
    """Keeps Ray from resolving a reference that is passed through the driver."""

    inner: Any


@dataclass(frozen=True)
class RolloutResult:
    """One rollout as the driver gets it from the rollout manager.

    Attributes:
        shards: one box per data-parallel rank. Empty with ``--debug-rollout-only``.
        metrics: ``rollout/...`` and ``perf/...`` values.
        version: weight version of the engines at its end. None without engines.
        oldest_version: weight version at its start. Older only if all engines died in between.
        seconds: from the request to the shards.
        num_tokens: prompt and response tokens of the samples that are trained on.
        forward_flops: floating-point operations of one forward pass over them.
        num_groups: prompts.
        example: one sample, for the console. None without samples.
    """

    shards: list[Box]
    metrics: dict[str, float]
    version: str | None = None
    oldest_version: str | None = None
    seconds: float = 0.0
    num_tokens: int = 0
    forward_flops: float = 0.0
    num_groups: int = 0
    example: Example | None = None

    @property
    def versions(self) -> tuple[str, str] | None:
        """(oldest, newest) weight version that its tokens may come from."""
        return None if self.version is None else (self.oldest_version or self.version, self.version)

    @classmethod
    def of(cls, samples: Sequence[Sample], metrics: dict[str, float]) -> RolloutResult:
        """The result without shards."""
        num_groups = len({sample.group_index for sample in samples})
        return cls([], metrics, num_groups=num_groups, example=Example.of(samples[0]) if samples else None)


def process_rollout_data(
    args: Namespace | None, rollout_data_ref: Sequence[Box], dp_rank: int, dp_size: int
) -> dict[str, Any]:
    """The columns of data-parallel rank ``dp_rank``.

    Args:
        args: None for callers without arguments. Then no deadline applies.

    Raises:
        DataError: the rollout was split for another number of ranks.
        ray.exceptions.GetTimeoutError: ``--train-timeout`` passed.
    """
    if len(rollout_data_ref) != dp_size:
        raise DataError(f"the rollout was split for {len(rollout_data_ref)} data-parallel ranks, there are {dp_size}.")
    deadline = {} if args is None else {"timeout": from_args(ClusterArgs, args).train_timeout}
    columns: dict[str, Any] = ray.get(rollout_data_ref[dp_rank].inner, **deadline)
    # raw_reward covers the whole rollout, partition has the positions of this rank's samples in it
    raw = columns.get("raw_reward")
    if raw is not None and "partition" in columns:
        columns = columns | {"local_raw_reward": [raw[position] for position in columns["partition"]]}
    return columns


def check_provenance(
    rollout_id: int,
    batch: dict[str, Any],
    version: str | None,
    *,
    oldest: str | None = None,
    allows_older: bool = False,
) -> None:
    """Refuse tokens of other weights than those of the last sync before the rollout.

    Args:
        version: weight version of the engines at the end of the rollout.
        oldest: their version at its start, if older.
        allows_older: responses may have been begun with earlier weights (``--partial-rollout``, rollout functions
            that keep groups under way).
    """
    if version is None:
        return  # replayed rollouts and supervised data: no engine was involved
    for index, versions in zip(batch["sample_indices"], batch.get("weight_versions") or [], strict=False):
        # numbers are compared as numbers: as text "10" would be older than "9"
        first = 0 if allows_older else int(oldest or version)
        foreign = {
            found
            for found in set(versions) - {version}
            if not (found.isdecimal() and first <= int(found) <= int(version))
        }
        if foreign:
            raise DataError(
                f"sample {index} of rollout {rollout_id} was generated with weight versions {versions}, but the "
                f"engines held version {version}: a weight sync did not reach the engine that made it."
            )


# Memory that holds a rank's batch until its trainer reads it (--rollout-data-transport).
#
# object-store   in Ray's shared memory, with a copy on other nodes
# nixl           its tensors stay in the manager's memory, and NIXL moves them into the trainer's: RDMA where the
#                network has it, else TCP or shared memory. The rest of the batch goes through the object store.

Transport: TypeAlias = Literal["object-store", "nixl"]


_ROLLOUTS = 16
"""Trained by then, unless ``--async-buffer-size`` is larger."""
_put: deque[list[bytes]] = deque()


def boxed(batches: Sequence[Any], transport: Transport = "object-store") -> list[Box]:
    """References to the batches of a rollout, made in an actor with :func:`actor_options`, and read in such actors."""
    how = {"_tensor_transport": "nixl"} if transport == "nixl" else {}
    boxes = [Box(ray.put(batch, **how)) for batch in batches]
    if transport == "object-store":
        # Ray 2.60: if the owner of an object drops it before its borrowers do, the owner keeps an entry of 300 bytes
        # for it, until it drops another reference to the object.
        _put.append([box.inner.binary() for box in boxes])
        if len(_put) > _ROLLOUTS:
            for name in _put.popleft():
                ray.ObjectRef(name)
    return boxes


def actor_options(transport: Transport) -> dict[str, Any]:
    """Ray options of the actors that send and receive."""
    return {"enable_tensor_transport": True} if transport == "nixl" else {}
