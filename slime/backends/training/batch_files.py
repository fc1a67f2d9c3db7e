"""What a trained batch leaves on disk: the samples of the run's record, and ``--save-debug-train-data``.

Called by ``actor`` on all ranks after the steps of a rollout; one rank of each data-parallel rank writes.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.backends.training.place import RankPlace
from slime.batch.arguments import ReplayArgs
from slime.config.groups import from_args
from slime.observability.sample_record import record_training
from slime.observability.tracking import run_directory
from slime.observability.train_data_utils import save_debug_train_data

__all__ = ["keep_batch"]


def keep_batch(args: Namespace, rollout_id: int, columns: dict[str, Any], place: RankPlace) -> None:
    """Write what is asked for.

    Args:
        columns: the rank's columns with whole responses, log-probs and advantages included.
        place: where the rank stands.
    """
    template, limit = from_args(ReplayArgs, args).save_debug_train_data, args.record_samples
    if template is None and limit == 0:
        return
    if not place.keeps_batch:
        return
    if limit > 0:
        run = run_directory(args)
        record_training(run, columns, rollout_id=rollout_id, limit=limit, data_parallel_rank=place.dp_rank)
    if template is not None:
        save_debug_train_data(template, rollout_id=rollout_id, rollout_data=columns, group=place.dp_group)
