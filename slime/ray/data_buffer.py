"""The Data Buffer: one Ray actor that owns the data source. Prompts go out, groups come back, its state is saved.

It outlives the rollout that uses it: an engine or rollout failure loses no prompt. Rollout functions never see the
actor, only :class:`DataBufferClient`, which looks like a data source.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import ray

from slime.data.sample import SampleGroup, iter_samples
from slime.hooks.load import load_function
from slime.observability.logging_utils import configure_logger
from slime.ray.cluster import worker_env
from slime.ray.waiting import get
from slime.rollout.source_state import load_groups, outstanding_path, save_groups

__all__ = ["DataBuffer", "DataBufferClient", "create_data_buffer"]

_CALL_TIMEOUT_S = 600.0


class DataBuffer:
    """Body of the actor: a data source (``--data-source-path``) behind remote calls.

    Groups that were drawn and neither used by a rollout nor returned are *outstanding*. A rollout function that keeps
    groups under way from one rollout to the next has some at every checkpoint: their prompts are saved with it and are
    the first to be drawn after a restart.
    """

    def __init__(self, args: Namespace) -> None:
        configure_logger(" data_buffer")
        self._args = args
        self._source: Any = None
        self._outstanding: dict[Any, SampleGroup] = {}

    def start(self) -> None:
        """Read the prompts. Not in the constructor: Ray would report its error as the death of an actor."""
        self._source = load_function(self._args.data_source_path, "data_source")(self._args)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        groups: list[SampleGroup] = self._source.get_samples(num_samples)
        self._outstanding |= {_number(group): group for group in groups}  # Ray sends copies: these stay as drawn
        return groups

    def add_samples(self, groups: list[SampleGroup]) -> None:
        self._source.add_samples(groups)
        for group in groups:
            self._outstanding.pop(_number(group), None)

    def settle(self, used: Sequence[Any] | None) -> None:
        """Groups with these numbers were used by a rollout; None: every group that was not returned."""
        if used is None:
            self._outstanding.clear()
        for number in used or ():
            self._outstanding.pop(number, None)

    def size(self) -> int:
        """Prompts in one epoch."""
        return len(self._source)

    def save(self, rollout_id: int) -> None:
        self._source.save(rollout_id)
        if self._args.save is not None:
            save_groups(outstanding_path(self._args.save, rollout_id), list(self._outstanding.values()))

    def load(self, rollout_id: int | None) -> None:
        self._source.load(rollout_id)
        if self._args.load is not None:
            groups = load_groups(outstanding_path(self._args.load, rollout_id))
            if groups:
                self._source.add_samples(groups)

    def get_metadata(self) -> dict[str, Any]:
        return self._source.get_metadata()

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self._source.update_metadata(metadata)


class DataBufferClient:
    """The data source as rollout functions see it. Every call has a deadline."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def _call(self, method: str, *arguments: Any) -> Any:
        ref = getattr(self._actor, method).remote(*arguments)
        return get(ref, _CALL_TIMEOUT_S, f"the Data Buffer to answer {method}()")

    def start(self) -> Any:
        """Start reading the prompts; returns a ref to wait for."""
        return self._actor.start.remote()

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        return self._call("get_samples", num_samples)

    def add_samples(self, groups: list[SampleGroup]) -> None:
        self._call("add_samples", groups)

    def settle(self, used: Sequence[Any] | None) -> None:
        self._call("settle", used)

    def save(self, rollout_id: int) -> None:
        self._call("save", rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        self._call("load", rollout_id)

    def get_metadata(self) -> dict[str, Any]:
        return self._call("get_metadata")

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self._call("update_metadata", metadata)

    def __len__(self) -> int:
        return self._call("size")

    def __call__(self, num_samples: int) -> list[SampleGroup]:
        """Hooks that were written for a bound ``get_samples`` may call the client itself."""
        return self.get_samples(num_samples)


def _number(group: SampleGroup) -> Any:
    first = next(iter_samples(group))
    return first.index if first.group_index is None else first.group_index


def create_data_buffer(args: Namespace) -> DataBufferClient:
    actor = ray.remote(DataBuffer).options(num_cpus=1, runtime_env={"env_vars": worker_env()}).remote(args)
    return DataBufferClient(actor)
