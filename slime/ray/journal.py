"""The journal: finished rollouts that no checkpoint covers. A killed run trains on them again (--deterministic-mode).

    <save>/rollout/journal/3.json    samples, metrics and weight version of rollout 3 (``.pt`` if they are large)

who waits for whom
rollout manager    packs the samples. A thread writes the file, after the Data Buffer has saved its state
driver             for the file of a rollout that it trained on, before the ledger counts the rollout as trained

So a start after a death finds all rollouts that were trained, takes their samples from the files, and generates from
the state of the Data Buffer after the last of them. Files that a checkpoint covers are deleted when the next one is
written.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from slime.algorithms.arguments import ModelCopyArgs
from slime.backends.training.arguments import CheckpointArgs, TrainerArgs
from slime.backends.training.checkpoint_files import iteration_directory, iteration_of, what_is_torn
from slime.batch.arguments import ReplayArgs
from slime.config.arguments import ClusterArgs
from slime.config.groups import RunConfig
from slime.data.arguments import BatchSizeArgs, RunLengthArgs
from slime.data.sample import SampleGroup, iter_samples
from slime.rollout.arguments import FilterArgs, GenerationArgs, RewardModelArgs
from slime.rollout.source_state import (
    delete_state,
    encoded,
    group_from_dicts,
    groups_to_dicts,
    numbers_path,
    outstanding_path,
    read_state,
    state_path,
    write_encoded,
)
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

FOLDER = "journal"
"""Below ``<save>/rollout``."""

_SLOW_S = 1.0
_WAIT_S = 60.0
# A change of these flags makes other samples: the rollouts are generated again.
_DECIDE_SAMPLES = (GenerationArgs, RewardModelArgs, FilterArgs, BatchSizeArgs)


@dataclass(frozen=True)
class Entry:
    """A finished rollout.

    Attributes:
        groups: as the rollout function returned them.
        metrics: its numbers.
        version: weight version of the engines at its start. None without a version.
    """

    groups: list[SampleGroup]
    metrics: dict[str, float]
    version: str | None

    @property
    def newest(self) -> str | None:
        """The newest weight version in it."""
        if self.version is None:
            return None
        found = {version for sample in iter_samples(self.groups) for version in map(str, sample.weight_versions)}
        return str(max(int(version) for version in {*found, self.version} if version.isdecimal()))


class Journal:
    """The journal of one run, in the rollout manager."""

    def __init__(self, config: RunConfig) -> None:
        save, load = config[CheckpointArgs].save or "", config[CheckpointArgs].load
        self._save = Path(save)
        self._is_continued = load is not None and config[RunLengthArgs].start_rollout_id is None
        self._is_continued &= os.path.realpath(load or "") == os.path.realpath(save)
        groups: list[Any] = [config[group] for group in _DECIDE_SAMPLES]
        flags = [dataclasses.asdict(group) for group in groups]
        self._made_by = json.dumps(flags, default=str)
        self._kept = range(0)
        self._complete = -1
        self._writers: dict[int, threading.Thread] = {}
        self._stuck: threading.Thread | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Journal | None:
        """None for a run that is not exact, writes no checkpoints in between, or generates nothing."""
        cluster, checkpoints = config[ClusterArgs], config[CheckpointArgs]
        is_partial = cluster.debug_train_only or cluster.debug_rollout_only
        is_partial |= config[ReplayArgs].load_debug_rollout_data is not None
        # --keep-old-actor: the weights that generated the rollouts would be needed as well
        has_none = checkpoints.save_interval is None or is_partial or config[ModelCopyArgs].keep_old_actor
        return None if checkpoints.save is None or has_none or not _is_exact(config[TrainerArgs]) else cls(config)

    def begin(self, first: int) -> int:
        """Start the run, whose weights were trained on the rollouts before ``first``.

        Returns:
            The first rollout to generate. Those from ``first`` on are in the journal.
        """
        stop = first
        while self._is_continued and self._read(stop) is not None:
            stop += 1
        self._kept = range(first, stop)
        self._delete(rollout_id for rollout_id in self._written() if rollout_id not in self._kept)
        if self._kept:
            logger.info("rollouts %d to %d were finished before the last start ended", first, stop - 1)
        return stop

    def take(self, rollout_id: int) -> Entry | None:
        """The rollout, if an earlier start of the run finished it.

        Raises:
            DataError: its file was changed since the start.
        """
        if rollout_id not in self._kept:
            return None
        state = self._read(rollout_id)
        if state is None:
            raise DataError(f"{self._path(rollout_id)} was changed or deleted since the run started. Start it again.")
        return Entry([group_from_dicts(group) for group in state["groups"]], state["metrics"], state["version"])

    def add(self, rollout_id: int, entry: Entry) -> None:
        """Write a finished rollout. The samples are packed before the return, the file is written in a thread."""
        covered = self._newest_checkpoint(rollout_id)
        self._delete(number for number in self._written() if number <= covered)
        if self._stuck is not None and self._stuck.is_alive():
            logger.warning("rollout %d is not in %s: the disk still hangs", rollout_id, self._folder)
            return
        state = {"made_by": self._made_by, "version": entry.version, "metrics": _numbers(entry.metrics)}
        try:
            content = encoded(state | {"groups": groups_to_dicts(entry.groups)})
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:  # objects of a user's code
            self._warn(rollout_id, error)
            return
        name = f"journal of rollout {rollout_id}"
        thread = threading.Thread(target=self._write, args=(rollout_id, *content), name=name, daemon=True)
        self._writers[rollout_id] = thread
        thread.start()

    def wait(self, rollout_id: int) -> None:
        """Wait until the rollout is on the disk. A disk that hangs stops the run for a minute once."""
        thread = self._writers.pop(rollout_id, None)
        if thread is None:
            return
        started = time.monotonic()
        thread.join(_WAIT_S)
        seconds = time.monotonic() - started
        if thread.is_alive():
            self._stuck = thread
            self._warn(rollout_id, f"the disk has not taken it within {seconds:.0f} s")
        elif seconds > _SLOW_S:
            logger.warning(
                "training waited %.1f s until the disk had rollout %d in %s", seconds, rollout_id, self._folder
            )

    @property
    def _folder(self) -> Path:
        return self._save / "rollout" / FOLDER

    def _path(self, rollout_id: int) -> Path:
        return self._folder / f"{rollout_id}.json"

    def _written(self) -> list[int]:
        return sorted({int(path.stem) for path in self._folder.glob("*") if path.stem.isdecimal()})

    def _checkpoints(self) -> set[int]:
        """Also those that are damaged."""
        return {number for path in self._save.glob("iter_*") if (number := iteration_of(path)) is not None}

    def _newest_checkpoint(self, rollout_id: int) -> int:
        """The newest complete checkpoint before a rollout. -1 without one."""
        for number in sorted(self._checkpoints(), reverse=True):
            # Its files are looked at once: a large model has thousands of them.
            if self._complete < number < rollout_id and what_is_torn(iteration_directory(self._save, number)) is None:
                self._complete = number
        return self._complete

    def _delete(self, rollout_ids: Iterable[int]) -> None:
        doomed = list(rollout_ids)
        needed = self._checkpoints() if doomed else set()
        for rollout_id in doomed:
            delete_state(self._path(rollout_id))  # before the states that it needs
            if rollout_id not in needed:
                delete_state(state_path(str(self._save), rollout_id))
                delete_state(outstanding_path(str(self._save), rollout_id))
                delete_state(numbers_path(str(self._save), rollout_id))

    def _read(self, rollout_id: int) -> dict[str, Any] | None:
        """None if the file does not exist, is damaged, or was made with other flags."""
        path = self._path(rollout_id)
        try:
            state = read_state(path)
        except DataError:
            logger.warning("rollout %d is generated again: its file in %s is damaged", rollout_id, self._folder)
            return None
        if state is not None and state["made_by"] != self._made_by:
            logger.warning("rollout %d is generated again: flags that decide its samples have changed", rollout_id)
            return None
        return state

    def _write(self, rollout_id: int, suffix: str, content: bytes) -> None:
        try:
            write_encoded(self._path(rollout_id), suffix, content)
        except OSError as error:
            self._warn(rollout_id, error)

    def _warn(self, rollout_id: int, reason: object) -> None:
        text = "rollout %d was not written to %s: a run that dies now generates it again (%s)"
        logger.warning(text, rollout_id, self._folder, reason)


def _is_exact(trainer: TrainerArgs) -> bool:
    """Samples of a death matter only if the same weights follow. Otherwise a bad batch must not come back with them."""
    return trainer.deterministic_mode


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
