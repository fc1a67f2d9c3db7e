"""Data sources: prompts out, groups back in, and a state that survives a restart.

Used inside the Data Buffer actor. Positions are those of the whole run: group and sample numbers never repeat, also
across a restart. Knows no rollout.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config.groups import from_args
from slime.data.prompts import Dataset, Mixture, StreamingDataset, draw_rows
from slime.data.sample import Sample, SampleGroup, as_groups, iter_samples
from slime.hooks import can_be_called, load_function, name_of, parameter_names
from slime.rollout.base_types import complete_args
from slime.rollout.failures import fresh_copy
from slime.rollout.source_state import (
    FIX,
    PromptData,
    changes,
    fingerprint,
    group_from_dicts,
    groups_to_dicts,
    read_state,
    state_path,
    write_state,
)
from slime.utils.errors import DataError
from slime.utils.prompt_sources import has_names, parse_path

logger = logging.getLogger(__name__)

# Keys of the checkpoint's state file. Their names cannot change.
_COUNTERS = ("sample_offset", "epoch_id", "sample_group_index", "sample_index")


class DataSource(abc.ABC):
    """Interface for ``--data-source-path``. A class with these methods works too, without this base."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """The next ``num_samples`` prompts, each as a group of samples."""

    @abc.abstractmethod
    def add_samples(self, samples: list[SampleGroup]) -> None:
        """Take groups back, to be drawn again."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the state that belongs to the end of a rollout."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Continue from the state that :meth:`save` wrote."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Prompts in one epoch."""


class RolloutDataSource(DataSource):
    """Prompts of ``--prompt-data``, epoch after epoch.

    A subclass whose ``__init__`` does not call this one works: attributes that it does not set are made at their first
    use, and :func:`make_data_source` sets ``args``.

    Attributes:
        epoch_id: current pass over the prompts.
        sample_offset: prompts of this pass that are already drawn. A stream counts rows, also those that were too long.
        sample_group_index, sample_index: numbers of the next group and sample.
        metadata: free for plugins, saved with the state.
        data_changes: why prompts may be skipped or drawn twice after a resume, else None.
    """

    data_changes: str | None = None

    epoch_id = sample_offset = sample_group_index = sample_index = 0
    args: Namespace

    def __init__(self, args: Any, dataset: Any = None) -> None:
        """``(args)``, ``(dataset, args)`` or keywords. Without a dataset it is read from ``--prompt-data``."""
        if hasattr(dataset, "n_samples_per_prompt"):
            args, dataset = dataset, args
        if args is None:
            raise TypeError(f"{type(self).__name__} needs args")
        self.args = complete_args(args)
        if dataset is not None:
            self.dataset = dataset
        _ = self.stream, self.dataset  # they read the file: its errors belong to the start
        _ = self._fingerprint  # of the file as it is now: it may be edited during the run
        self._shuffle()

    @functools.cached_property
    def dataset(self) -> Dataset | None:
        return from_args(PromptData, self.args).dataset() if self._reads_prompts and not self._is_stream else None

    @functools.cached_property
    def stream(self) -> StreamingDataset | Mixture | None:
        """Of ``--streaming-data``, or of several sources."""
        is_stream = self._reads_prompts and self._is_stream and vars(self).get("dataset") is None
        return from_args(PromptData, self.args).stream() if is_stream else None

    @property
    def _is_stream(self) -> bool:
        return self.args.streaming_data or has_names(self.args.prompt_data)

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        return {}

    @property
    def _reads_prompts(self) -> bool:
        return self.args.rollout_global_dataset and self.args.prompt_data is not None

    def _shuffle(self) -> None:
        """Bring the prompts into the order of the current epoch. Cheap if they are in it."""
        if self.args.rollout_shuffle and self.stream is None and self.dataset is not None:
            self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        return [self._group(prompt) for prompt in self._draw(num_samples)]

    def _draw(self, count: int) -> list[Sample]:
        if self.stream is not None:
            prompts = self.stream.draw(count)
            self.epoch_id, self.sample_offset = self.stream.epoch_id, self.stream.offset
            return prompts
        if self.dataset is None:
            # Without prompt data a custom generate function makes its prompts.
            return [Sample() for _ in range(count)]
        if len(self.dataset) == 0:
            raise DataError(f"--prompt-data {self.args.prompt_data}: there is no prompt to draw")
        drawn, self.epoch_id, self.sample_offset = draw_rows(
            self.dataset, self.epoch_id, self.sample_offset, count, shuffles=self.args.rollout_shuffle
        )
        return drawn

    def _group(self, prompt: Sample) -> SampleGroup:
        group: SampleGroup = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = fresh_copy(prompt)
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[SampleGroup]) -> None:
        raise RuntimeError(f"{type(self).__name__} is read-only: groups can be returned to a source with a buffer only")

    def __len__(self) -> int:
        if isinstance(self.stream, Mixture):
            return len(self.stream)
        return 0 if self.dataset is None else len(self.dataset)  # a stream does not know

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def save(self, rollout_id: int) -> None:
        if not self.args.rollout_global_dataset or self.args.save is None:
            return
        write_state(state_path(self.args.save, rollout_id), self._state())

    def load(self, rollout_id: int | None = None) -> None:
        if not complete_args(self.args).rollout_global_dataset or self.args.load is None:
            return
        path = state_path(self.args.load, rollout_id)
        state = read_state(path)
        if state is None:
            if self.args.strict_resume:
                raise DataError(f"--strict-resume: the checkpoint has no data state {path}.json")
            logger.warning("no data state %s.json: prompts start from the first row", path)
            self.data_changes = "there was no data state: prompts started from the first row"
            return
        self._check_state(path, state)
        self._set_state(state)
        logger.info("prompts continue at row %d of epoch %d (%s)", self.sample_offset, self.epoch_id, path.name)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        if isinstance(self.stream, Mixture):
            state["sources"] = self.stream.state()
        return state | {"metadata": self.metadata, "data": self._fingerprint}

    @functools.cached_property
    def _fingerprint(self) -> dict[str, Any] | None:
        """None if this class has not read ``--prompt-data``: a subclass may read something else under that name."""
        has_read = vars(self).get("dataset") is not None or vars(self).get("stream") is not None
        if not self._reads_prompts or not (has_read or os.path.isfile(parse_path(self.args.prompt_data)[0])):
            return None
        return fingerprint(vars(self.args), None if self.stream is not None else len(self))

    def _check_state(self, path: Path, state: dict[str, Any]) -> None:
        """
        Raises:
            DataError: an invalid counter, or data that changed since, without ``--accept-changed-data``.
        """
        for name in _COUNTERS:
            value = state.get(name, 0)
            if type(value) is not int or value < 0:
                raise DataError(f"{path}: {name} is {value!r}, and it must be a whole number from 0 on; {FIX}")
        if not self._reads_prompts:
            return
        before, now = state.get("data"), self._fingerprint
        if not isinstance(before, dict) or now is None:
            self.data_changes = "there is no fingerprint of the data: whether they changed is not known"
            logger.warning("%s: %s", path, self.data_changes)
            return
        order, other = changes(before, now)
        if other:
            logger.warning("since the checkpoint %s changed", ", ".join(other))
        if order and not self.args.accept_changed_data:
            raise DataError(
                f"{path}: since this state was saved, {', '.join(order)} changed, so row "
                f"{state.get('sample_offset', 0)} of epoch {state.get('epoch_id', 0)} is another prompt: some would be "
                "skipped and others drawn twice. "
                "Use what the run was started with, or --accept-changed-data to go on at that row all the same"
            )
        if order:
            self.data_changes = f"--accept-changed-data: since the checkpoint {', '.join(order)} changed"
            logger.warning("%s: some prompts are skipped, others are drawn twice", self.data_changes)

    def _set_state(self, state: dict[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self, name, state.get(name, 0))
        self.metadata = state.get("metadata", {})
        if isinstance(self.stream, Mixture):
            self.stream.restore(state.get("sources", {}), self.sample_offset)
        elif self.stream is not None:
            self.stream.seek(self.epoch_id, self.sample_offset)
        self._shuffle()


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The default: groups that were returned are drawn before new prompts.

    A subclass may override ``buffer_filter(args, buffer, num_samples)``. ``--buffer-filter-path`` names a function
    ``f(args, rollout_id, buffer, num_samples)``, whose rollout id is None: a source does not know for which rollout it
    draws. ``buffer`` holds groups, or samples for a filter that fails on groups (:meth:`BufferFilter.takes_samples`).
    """

    _filter_takes_samples = False

    @functools.cached_property
    def buffer(self) -> list[SampleGroup]:
        return []

    @functools.cached_property
    def buffer_filter(self) -> Callable[..., Any]:
        path = self.args.buffer_filter_path
        function: Callable[..., Any] = pop_first if path is None else load_function(path, "filter")
        return function

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        groups = self._from_buffer(num_samples)
        return groups + super().get_samples(num_samples - len(groups))

    def _from_buffer(self, num_samples: int) -> list[SampleGroup]:
        if not self.buffer or num_samples <= 0:
            return []
        # A copy: a filter that fails after it removed groups must not lose them.
        buffer, chosen = list(self.buffer), BufferFilter(self.buffer_filter, self.args)
        try:
            groups = chosen.choose(buffer, num_samples, has_samples=self._filter_takes_samples)
        except (AttributeError, TypeError):
            if self._filter_takes_samples or not chosen.takes_samples():
                raise
            logger.info("the buffer filter works on samples, not on groups: it gets the samples of the buffer")
            self._filter_takes_samples = True
            buffer = list(self.buffer)
            groups = chosen.choose(buffer, num_samples, has_samples=True)
        self.buffer[:] = buffer
        return groups

    def add_samples(self, samples: list[SampleGroup]) -> None:
        if not samples:
            return
        groups = as_groups(samples, self._group)
        for group in groups:
            if len(group) != self.args.n_samples_per_prompt:
                raise DataError(
                    f"a group of {len(group)} samples cannot be returned: --n-samples-per-prompt is "
                    f"{self.args.n_samples_per_prompt}"
                )
        self.buffer += groups

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"buffer": groups_to_dicts(self.buffer)}

    def _set_state(self, state: dict[str, Any]) -> None:
        super()._set_state(state)
        self.buffer = [group_from_dicts(group) for group in state.get("buffer", [])]


def make_data_source(maker: Callable[..., Any], args: Namespace) -> Any:
    """Make the object of ``--data-source-path``: with ``(args)``, with ``(dataset, args)``, or without arguments.

    The dataset is that of ``--prompt-data``. An object without attribute ``args`` gets it.
    """
    complete_args(args)
    if parameter_names(maker)[:2] == ["dataset", "args"]:
        dataset = None if args.prompt_data is None else from_args(PromptData, args).dataset()
        source = maker(dataset, args)
    else:
        source = maker(args) if can_be_called(maker, ("args",)) else maker()
    if not hasattr(source, "args"):
        with contextlib.suppress(AttributeError):  # an object with __slots__ does without
            source.args = args
    return source


def pop_first(args: Any, rollout_id: Any, buffer: list[SampleGroup], num_samples: int) -> list[SampleGroup]:
    """Remove and return the first groups of the buffer."""
    count = min(len(buffer), num_samples)
    taken = buffer[:count]
    del buffer[:count]
    return taken


@dataclass(frozen=True)
class BufferFilter:
    """The user's ``function(args, rollout_id, buffer, count)`` or ``function(args, buffer, count)``."""

    function: Callable[..., Any]
    args: Any

    def __call__(self, buffer: list[Any], count: int) -> Any:
        names = parameter_names(self.function)
        takes_rollout = "rollout_id" in names or len(names) >= 4
        return self.function(self.args, *([None] if takes_rollout else []), buffer, count)

    def takes_samples(self) -> bool:
        """Whether it expects single samples: it fails on a made-up buffer of groups, and not on their samples."""

        def works_on(buffer: list[Any]) -> bool:
            try:
                self(buffer, 1)
            except (AttributeError, TypeError):
                return False
            except Exception:  # users' code may raise anything, and the real call shows it
                return True
            return True

        if self.function is pop_first:
            return False
        made_up = functools.partial(_made_up, self.args.reward_key, max(1, self.args.n_samples_per_prompt))
        return not works_on(made_up()) and works_on(list(iter_samples(made_up())))

    def choose(self, buffer: list[SampleGroup], count: int, *, has_samples: bool) -> list[SampleGroup]:
        """At most ``count`` groups, which leave the buffer whether the filter removed them or not.

        Args:
            has_samples: the answer of :meth:`takes_samples`.

        Raises:
            DataError: more groups than asked for, or something that is not in the buffer.
        """
        what = f"the buffer filter {name_of(self.function)} (--buffer-filter-path)"
        if has_samples:
            group_of = {id(sample): group for group in buffer for sample in iter_samples(group)}
            # The filter counts samples, so it may take all samples of ``count`` groups.
            chosen = self(list(iter_samples(buffer)), count * max(map(len, buffer), default=1))
            if any(id(sample) not in group_of for sample in chosen):
                raise DataError(f"{what} returned something that is not a sample of the buffer")
            groups = list({id(group): group for group in (group_of[id(sample)] for sample in chosen)}.values())[:count]
        else:
            groups = self(buffer, count)
        if len(groups) > count:
            raise DataError(f"{what} returned {len(groups)} groups where {count} were asked for")
        # By identity: groups that compare equal are still different groups.
        taken = {id(group) for group in groups}
        buffer[:] = [group for group in buffer if id(group) not in taken]
        return groups


def _made_up(key: str | None, size: int) -> list[SampleGroup]:
    def sample(index: int) -> Sample:
        reward = float(index % 2)
        return Sample(
            group_index=index // size,
            index=index,
            prompt="1+1=",
            label="2",
            tokens=[1, 2],
            response="2",
            response_length=1,
            reward={key: reward} if key else reward,
            status=Sample.Status.COMPLETED,
        )

    return [[sample(group * size + i) for i in range(size)] for group in range(2)]
