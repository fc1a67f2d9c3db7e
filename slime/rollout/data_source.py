"""Data sources: prompts out, groups back in, and a state that survives a restart.

Used inside the Data Buffer actor. Positions are those of the whole run: group and sample numbers never repeat, also
across a restart. Knows no rollout.
"""

from __future__ import annotations

import abc
import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.data.chat import load_tokenizer
from slime.data.media import load_processor
from slime.data.prompts import Dataset, open_prompts
from slime.data.sample import Sample, SampleGroup
from slime.data.streaming import StreamingDataset
from slime.hooks.load import load_function
from slime.hooks.signature import can_be_called, parameter_names
from slime.rollout.failures import fresh_copy
from slime.rollout.grouping import as_groups
from slime.rollout.settings import setting
from slime.rollout.source_state import group_from_dicts, group_to_dicts, read_state, state_path, write_state
from slime.utils.errors import DataError

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "make_data_source", "pop_first"]

logger = logging.getLogger(__name__)

_COUNTERS = ("sample_offset", "epoch_id", "sample_group_index", "sample_index")


class DataSource(abc.ABC):
    """What ``--data-source-path`` names. A class with these methods works too, without this base."""

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

    Attributes:
        epoch_id: current pass over the prompts.
        sample_offset: prompts of this pass that are already drawn; of a stream, rows, with those that were too long.
        sample_group_index, sample_index: numbers of the next group and sample.
        metadata: free for plugins; saved with the state.
    """

    def __init__(self, *positional: Any, args: Namespace | None = None, dataset: Dataset | None = None) -> None:
        """``(args)``, ``(dataset, args)`` or keywords. Without a dataset it is read from ``--prompt-data``."""
        if len(positional) == 2:
            dataset, args = positional
        elif positional:
            args = positional[0]
        if args is None:
            raise TypeError(f"{type(self).__name__} needs args")
        self.args = args
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.dataset = dataset
        self.stream: StreamingDataset | None = None
        if dataset is None and args.rollout_global_dataset and args.prompt_data is not None:
            if args.streaming_data:
                self.stream = _open_stream(args)
            else:
                self.dataset = _load_dataset(args)
        if self.dataset is not None and args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        return [self._group(prompt) for prompt in self._draw(num_samples)]

    def _draw(self, count: int) -> list[Sample]:
        if self.stream is not None:
            prompts = self.stream.draw(count)
            self.epoch_id, self.sample_offset = self.stream.epoch_id, self.stream.offset
            return prompts
        if self.dataset is None:
            return [Sample() for _ in range(count)]
        if len(self.dataset) == 0:
            raise DataError(f"--prompt-data {self.args.prompt_data}: there is no prompt to draw")
        drawn: list[Sample] = []
        while len(drawn) < count:
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
                if self.args.rollout_shuffle:
                    self.dataset.shuffle(self.epoch_id)
            part = self.dataset.samples[self.sample_offset : self.sample_offset + count - len(drawn)]
            self.sample_offset += len(part)
            drawn += part
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
        if not self.args.rollout_global_dataset or self.args.load is None:
            return
        path = state_path(self.args.load, rollout_id)
        state = read_state(path)
        if state is None:
            if setting(self.args, "strict_resume"):
                raise DataError(f"--strict-resume: the checkpoint has no data state {path}.json")
            logger.warning("no data state %s.json: prompts start from the first row", path)
            return
        self._set_state(state)
        logger.info("prompts continue at row %d of epoch %d (%s)", self.sample_offset, self.epoch_id, path.name)

    def _state(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in _COUNTERS} | {"metadata": self.metadata}
        return state if self.stream is None else state | {"is_stream": True}

    def _set_state(self, state: dict[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self, name, state.get(name, 0))
        self.metadata = state.get("metadata", {})
        if bool(state.get("is_stream")) != (self.stream is not None):
            logger.warning(
                "--streaming-data was switched since the checkpoint: prompts come in another order from here"
            )
        if self.stream is not None:
            self.stream.seek(self.epoch_id, self.sample_offset)
        if self.dataset is not None and self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The default: groups that were returned are drawn before new prompts.

    A subclass may override ``buffer_filter(args, buffer, num_samples)``; ``--buffer-filter-path`` names a function
    ``f(args, rollout_id, buffer, num_samples)``. The rollout id is None: a source is not told for whom it draws.
    """

    buffer_filter: Callable[..., list[SampleGroup]]

    def __init__(self, *positional: Any, args: Namespace | None = None, dataset: Dataset | None = None) -> None:
        super().__init__(*positional, args=args, dataset=dataset)
        self.buffer: list[SampleGroup] = []
        if not hasattr(type(self), "buffer_filter"):
            path = self.args.buffer_filter_path
            self.buffer_filter = pop_first if path is None else load_function(path, "filter")

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        groups = self._from_buffer(num_samples)
        return groups + super().get_samples(num_samples - len(groups))

    def _from_buffer(self, num_samples: int) -> list[SampleGroup]:
        if not self.buffer or num_samples <= 0:
            return []
        if "rollout_id" in parameter_names(self.buffer_filter) or len(parameter_names(self.buffer_filter)) >= 4:
            groups = self.buffer_filter(self.args, None, self.buffer, num_samples)
        else:
            groups = self.buffer_filter(self.args, self.buffer, num_samples)
        if len(groups) > num_samples:
            raise DataError(f"--buffer-filter-path returned {len(groups)} groups where {num_samples} were asked for")
        chosen = {id(group) for group in groups}
        self.buffer[:] = [group for group in self.buffer if id(group) not in chosen]
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
        return super()._state() | {"buffer": [group_to_dicts(group) for group in self.buffer]}

    def _set_state(self, state: dict[str, Any]) -> None:
        super()._set_state(state)
        self.buffer = [group_from_dicts(group) for group in state.get("buffer", [])]


def make_data_source(maker: Callable[..., Any], args: Namespace) -> Any:
    """An object of what ``--data-source-path`` names: made with ``(args)``; with ``(dataset, args)``, the dataset being
    the prompts of ``--prompt-data``; or with nothing, and then it gets an attribute ``args``.
    """
    if parameter_names(maker)[:2] == ["dataset", "args"]:
        return maker(None if args.prompt_data is None else _load_dataset(args), args)
    if can_be_called(maker, ("args",)):
        return maker(args)
    source = maker()
    source.args = args
    return source


def pop_first(args: Any, rollout_id: Any, buffer: list[SampleGroup], num_samples: int) -> list[SampleGroup]:
    """First in, first out; removes what it returns."""
    count = min(len(buffer), num_samples)
    taken = buffer[:count]
    del buffer[:count]
    return taken


def _load_dataset(args: Namespace) -> Dataset:
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    return Dataset(
        args.prompt_data,
        tokenizer,
        _processor(args),
        args.rollout_max_prompt_len,
        seed=args.rollout_seed,
        num_workers=args.num_data_workers,
        **_row_settings(args),
    )


def _open_stream(args: Namespace) -> StreamingDataset:
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    measures = args.rollout_max_prompt_len is not None
    maker, read = open_prompts(
        args.prompt_data, tokenizer, processor=_processor(args), measures=measures, **_row_settings(args)
    )
    return StreamingDataset(
        read,
        maker,
        name=f"--prompt-data {args.prompt_data}",
        max_length=args.rollout_max_prompt_len,
        seed=args.rollout_seed,
        shuffles=args.rollout_shuffle,
        num_workers=args.num_data_workers,
    )


def _processor(args: Namespace) -> Any:
    return None if args.multimodal_keys is None else load_processor(args.hf_checkpoint, trust_remote_code=True)


def _row_settings(args: Namespace) -> dict[str, Any]:
    return {
        "multimodal_keys": args.multimodal_keys,
        "skips_bad_lines": args.skip_bad_lines,
        "prompt_key": args.input_key,
        "label_key": args.label_key,
        "metadata_key": args.metadata_key,
        "tool_key": args.tool_key,
        "apply_chat_template": args.apply_chat_template,
        "apply_chat_template_kwargs": args.apply_chat_template_kwargs,
    }
