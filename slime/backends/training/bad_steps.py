"""Writes batches to disk: those of steps that failed or were skipped, and those that the flags ask for.

    a step raises                     its batch is dumped, the run ends
    gradients are not finite          the same. --no-check-for-nan-in-loss-and-grad skips, counts
                                      (train/skipped_steps) and dumps the step. Ten in a row end the run

Dumps are ``failed_steps/rollout_<id>_rank_<rank>.pt`` under --save, else --output-dir. Every rank writes its part.
Called by ``trainer``.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slime.backends.training.data import RankPlace
from slime.batch.arguments import ReplayArgs
from slime.config.groups import from_args
from slime.observability.sample_record import record_training
from slime.observability.tracking import run_directory
from slime.observability.train_data_utils import save_debug_train_data
from slime.utils.errors import SlimeError

logger = logging.getLogger(__name__)

_MOST_IN_A_ROW = 10  # skipped steps
_MORE_ROOM = (
    " The device's memory is full: lower --max-tokens-per-gpu (or --micro-batch-size), recompute activations "
    "(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1), cut the softmax into chunks "
    "(--log-probs-chunk-size), share sequences or the model among more ranks (--context-parallel-size, "
    "--tensor-model-parallel-size), or keep the optimizer on the host (--optimizer-cpu-offload)."
)


class BadSteps:
    """The bad steps of one rank.

    Args:
        directory: parent of ``failed_steps``.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self._directory = Path(directory) / "failed_steps"
        self._rank = rank
        self._num_skipped = 0
        self._num_in_a_row = 0

    @contextmanager
    def dumping(self, rollout_id: int, batch: dict[str, Any]) -> Iterator[None]:
        """Dump ``batch`` if the block raises, and raise a SlimeError that names the file."""
        try:
            yield
        except Exception as error:  # users' functions may raise anything
            dump = self._dump(rollout_id, batch, str(error))
            fix = _MORE_ROOM if isinstance(error, torch.OutOfMemoryError) else ""
            raise SlimeError(
                f"trainer rank {self._rank} failed on rollout {rollout_id}: {type(error).__name__}: {error} "
                f"Its batch {dump}.{fix}"
            ) from error

    def count(self, rollout_id: int, step: int, batch: dict[str, Any], reason: str | None) -> float:
        """Count a step. Returns the number of skipped steps of the run, this one included.

        Args:
            reason: why the step was skipped. None: it was applied. Empty: fp16 gradients overflowed.

        Raises:
            SlimeError: too many in a row.
        """
        if reason is None:
            self._num_in_a_row = 0
            return float(self._num_skipped)
        self._num_skipped += 1
        # overflows are how fp16 finds its loss scale: any number of them in a row is normal
        if not reason:
            return float(self._num_skipped)
        self._num_in_a_row += 1
        if self._num_in_a_row >= _MOST_IN_A_ROW:
            raise SlimeError(
                f"rollout {rollout_id}, step {step}: {reason}; the step was skipped, as were the "
                f"{self._num_in_a_row - 1} before it. The weights do not change any more."
            )
        dump = self._dump(rollout_id, batch, reason)
        logger.warning("rollout %d, step %d skipped: %s; its batch %s", rollout_id, step, reason, dump)
        return float(self._num_skipped)

    def _dump(self, rollout_id: int, batch: dict[str, Any], error: str) -> str:
        """Write the batch. Returns the result as the end of a sentence. Never raises."""
        path = self._directory / f"rollout_{rollout_id}_rank_{self._rank}.pt"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            torch.save({"rollout_id": rollout_id, "rank": self._rank, "error": error, "batch": batch}, path)
        # the error that led to the dump must not be replaced. PyTorch raises RuntimeError for a full disk.
        except (OSError, RuntimeError) as failure:
            return f"could not be written to {path} ({failure})"
        return f"is in {path}"


def keep_batch(args: Namespace, rollout_id: int, columns: dict[str, Any], place: RankPlace) -> None:
    """Write the samples of the run's record, and ``--save-debug-train-data``.

    Args:
        columns: the rank's columns with whole responses, log-probs and advantages included.
        place: of the rank.
    """
    template, limit = from_args(ReplayArgs, args).save_debug_train_data, args.record_samples
    if template is None and limit == 0:
        return
    # ranks that share samples have the same columns: one of them writes
    if not place.keeps_batch:
        return
    if limit > 0:
        run = run_directory(args)
        record_training(run, columns, rollout_id=rollout_id, limit=limit, data_parallel_rank=place.dp_rank)
    if template is not None:
        save_debug_train_data(template, rollout_id=rollout_id, rollout_data=columns, group=place.dp_group)
