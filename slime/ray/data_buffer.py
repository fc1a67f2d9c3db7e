"""The Data Buffer: one Ray actor that owns the data source and saves its state with every checkpoint.

It outlives a failed rollout, so no prompt is lost. Rollout functions use it through :class:`DataBufferClient`, which
has the methods of a data source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any

import ray

from slime.backends.training.arguments import CheckpointArgs
from slime.config.groups import RunConfig
from slime.data.arguments import BatchSizeArgs, PromptDataArgs
from slime.data.ledger import Event, Ledger, ledger_path
from slime.data.sample import Sample, SampleGroup, as_groups, iter_samples
from slime.hooks import load_function
from slime.observability.logging_utils import configure_logger
from slime.ray.run.cluster import worker_env
from slime.ray.watch import get
from slime.ray.watch.heartbeat import register_process
from slime.rollout.data_source import make_data_source
from slime.rollout.failures import fresh_copy
from slime.rollout.source_state import (
    load_groups,
    numbers_path,
    outstanding_path,
    read_state,
    save_groups,
    write_state,
)
from slime.utils.async_utils import exits_are_errors

_CALL_TIMEOUT_S = 600.0


@exits_are_errors
class DataBuffer:
    """Body of the actor: remote calls to a data source (``--data-source-path``).

    Groups that were drawn and neither used by a rollout nor returned are *outstanding*. A rollout function that keeps
    groups under way from one rollout to the next has some at every checkpoint.
    """

    def __init__(self, config: RunConfig, ledger: Path | None = None) -> None:
        """
        Args:
            ledger: file that records the fate of every prompt, if any.
        """
        configure_logger(" data_buffer")
        register_process("the Data Buffer", config.args.heartbeat_timeout)
        self._config = config
        self._checkpoints = config[CheckpointArgs]
        self._ledger_path = ledger
        self._ledger: Ledger | None = None
        self._source: Any = None
        self._outstanding: dict[Any, SampleGroup] = {}
        self._given_back: list[Any] = []
        self._next_group = self._next_sample = 0
        self._source_counts = True

    def start(self) -> None:
        """Read the prompts and open the ledger."""
        # Not in the constructor, where Ray would report an error as the death of an actor.
        if self._ledger_path is not None:
            self._ledger = Ledger(self._ledger_path)
        source = load_function(self._config[PromptDataArgs].data_source_path, "data_source")
        self._source = make_data_source(source, self._config.args)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        groups = as_groups(self._source.get_samples(num_samples), self._copies)
        self._number_all(groups)
        drawn = {_number(group): group for group in groups}
        self._outstanding |= drawn  # Ray sends copies: these stay as drawn
        self._record("drawn", groups=drawn)
        return groups

    def add_samples(self, groups: list[SampleGroup]) -> None:
        self._optional("add_samples", groups)
        numbers = [_number(group) for group in groups]
        for number in numbers:
            self._outstanding.pop(number, None)
        self._record("returned", groups=numbers)

    def _copies(self, prompt: Sample) -> SampleGroup:
        return [fresh_copy(prompt) for _ in range(self._config[BatchSizeArgs].n_samples_per_prompt or 1)]

    def _number_all(self, groups: list[SampleGroup]) -> None:
        """Number the samples of a source that leaves ``group_index`` or ``index`` empty."""
        for group in groups:
            for sample in iter_samples(group):
                self._source_counts &= None not in (sample.group_index, sample.index)
                sample.group_index = self._next_group if sample.group_index is None else sample.group_index
                # numbers of the source and of this buffer must not collide: continue above the largest one
                sample.index = self._next_sample if sample.index is None else sample.index
                self._next_sample = max(self._next_sample, int(sample.index) + 1)
            self._next_group = max(self._next_group, int(_number(group)) + 1)

    def _optional(self, method: str, *arguments: Any) -> Any:
        """Call a method of the user's source, if it has it."""
        function = getattr(self._source, method, None)
        return None if function is None else function(*arguments)

    def look_up(self, name: str) -> tuple[str, Any]:
        """Look up ``name`` in the user's source: ``("method", None)``, ``("value", it)`` or ``("missing", names)``."""
        missing = object()
        value = getattr(self._source, name, missing)
        if value is missing:
            names = ", ".join(key for key in dir(self._source) if not key.startswith("_"))
            return "missing", f"{type(self._source).__name__} (--data-source-path); it has {names}"
        return ("method", None) if callable(value) else ("value", value)

    def call(self, method: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Call a method of the user's source by name."""
        return getattr(self._source, method)(*arguments, **keywords)

    def settle(self, rollout_id: int, used: Sequence[Any], keeps_others: bool) -> None:
        """Record that a rollout ended with the groups of these numbers as its batch.

        Args:
            keeps_others: groups that it neither used nor returned are still under way. Otherwise they are dropped.
        """
        for number in used:
            self._outstanding.pop(number, None)
        self._record("used", rollout_id, used)
        if not keeps_others:
            self._record("dropped", rollout_id, self._outstanding)
            self._outstanding.clear()

    def drop(self, rollout_id: int, groups: list[SampleGroup]) -> None:
        """Forget groups that a rollout function with groups under way rejects: they are not drawn again."""
        numbers = [_number(group) for group in groups]
        for number in numbers:
            self._outstanding.pop(number, None)
        self._record("dropped", rollout_id, numbers)

    def begin(self, rollout_id: int, first_trained: int | None = None) -> None:
        """Start the run at ``rollout_id``: continue from the state saved after the rollout before it.

        Args:
            first_trained: of the rollouts before it that are trained on again, from the journal. None: there are none.
        """
        if rollout_id > 0:
            self.load(rollout_id - 1)
        changed = getattr(self._source, "data_changes", None)
        self._record("begin", rollout_id, self._given_back, changed=changed, trains=first_trained)

    def trained(self, rollout_id: int) -> None:
        """Record that the trainer took its steps on rollout ``rollout_id``."""
        self._record("trained", rollout_id)

    def _record(
        self, event: Event, rollout: int | None = None, groups: Iterable[Any] | None = None, **more: Any
    ) -> None:
        if self._ledger is not None:
            self._ledger.write(event, rollout=rollout, groups=groups, **more)

    def size(self) -> int:
        """Prompts in one epoch."""
        return len(self._source) if isinstance(self._source, Sized) else 0

    def save(self, rollout_id: int) -> None:
        self._optional("save", rollout_id)
        if self._checkpoints.save is not None:
            # Otherwise a restart would lose the prompts of groups under way: the source has already passed them.
            save_groups(outstanding_path(self._checkpoints.save, rollout_id), list(self._outstanding.values()))
            if not self._source_counts:  # numbers must not repeat after a restart
                numbers = {"group": self._next_group, "sample": self._next_sample}
                write_state(numbers_path(self._checkpoints.save, rollout_id), numbers)
        self._record("saved", rollout_id, self._outstanding)

    def load(self, rollout_id: int | None) -> None:
        self._optional("load", rollout_id)
        if self._checkpoints.load is not None:
            numbers = read_state(numbers_path(self._checkpoints.load, rollout_id)) or {}
            self._next_group = max(self._next_group, numbers.get("group", 0))
            self._next_sample = max(self._next_sample, numbers.get("sample", 0))
            groups = load_groups(outstanding_path(self._checkpoints.load, rollout_id))
            if groups:  # back into the source, which draws them first
                self._optional("add_samples", groups)
                self._given_back = [_number(group) for group in groups]

    def get_metadata(self) -> dict[str, Any]:
        return self._optional("get_metadata") or {}

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self._optional("update_metadata", metadata)


class DataBufferClient:
    """The data source for rollout functions, with all methods of the user's source. Every call has a deadline."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def _call(self, method: str, *arguments: Any) -> Any:
        ref = getattr(self.actor, method).remote(*arguments)
        return get(ref, _CALL_TIMEOUT_S, f"the Data Buffer to answer {method}()")

    def __getattr__(self, name: str) -> Any:
        """A public method or attribute of the user's data source. Arguments and results are copies.

        Raises:
            AttributeError: the data source has no such name.
        """
        # "actor" does not exist yet while pickle restores the client: a look-up of it would recurse
        if name.startswith("_") or name == "actor":
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        kind, value = self._call("look_up", name)
        if kind == "missing":
            raise AttributeError(f"there is no {name!r} in the data source {value}")
        return value if kind == "value" else lambda *args, **kwargs: self._call("call", name, args, kwargs)

    def start(self) -> Any:
        """Start reading the prompts. Returns a ref to wait for."""
        return self.actor.start.remote()

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        groups: list[SampleGroup] = self._call("get_samples", num_samples)
        return groups

    def add_samples(self, groups: list[SampleGroup]) -> None:
        self._call("add_samples", groups)

    def settle(self, rollout_id: int, used: Sequence[Any], keeps_others: bool) -> None:
        self._call("settle", rollout_id, used, keeps_others)

    def drop(self, rollout_id: int, groups: list[SampleGroup]) -> None:
        self._call("drop", rollout_id, groups)

    def begin(self, rollout_id: int, first_trained: int | None = None) -> None:
        self._call("begin", rollout_id, first_trained)

    def trained(self, rollout_id: int) -> None:
        self._call("trained", rollout_id)

    def kill(self) -> None:
        ray.kill(self.actor)

    def save(self, rollout_id: int) -> None:
        self._call("save", rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        self._call("load", rollout_id)

    def get_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = self._call("get_metadata")
        return metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self._call("update_metadata", metadata)

    def __len__(self) -> int:
        return int(self._call("size"))

    def __call__(self, num_samples: int) -> list[SampleGroup]:
        """``get_samples``, for hooks that expect a bound method in the place of the client."""
        return self.get_samples(num_samples)


def _number(group: SampleGroup) -> Any:
    first = next(iter_samples(group))
    return first.index if first.group_index is None else first.group_index


def create_data_buffer(config: RunConfig, directory: Path) -> tuple[DataBufferClient, Path]:
    """The Data Buffer of the run in ``directory``, and the file of its ledger."""
    ledger = ledger_path(config[CheckpointArgs].save, directory)
    actor = ray.remote(DataBuffer).options(num_cpus=1, runtime_env={"env_vars": worker_env()}).remote(config, ledger)
    return DataBufferClient(actor), ledger
