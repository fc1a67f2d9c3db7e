"""The destinations of samples when a rollout or an evaluation has ended: ``<run>/samples`` and ``--trace-endpoint``."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import Literal

from slime.data.sample import Sample
from slime.observability.sample_record import BackgroundWriter, record_rollout
from slime.observability.trace_export import TraceExporter
from slime.observability.tracking import run_directory

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class FinishedSamples:
    """Writes and sends in threads: the caller waits only while a disk is far behind."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._records = BackgroundWriter()
        self._traces = TraceExporter(args)

    def write(self, samples: Sequence[Sample], rollout_id: int, kind: Literal["rollout", "eval"]) -> None:
        self._traces.export(samples)
        run, limit = run_directory(self._args), self._args.record_samples
        key = self._args.reward_key
        record_rollout(
            run, samples, rollout_id=rollout_id, limit=limit, reward_key=key, kind=kind, writer=self._records
        )

    def flush(self) -> None:
        """Wait for the last files and spans."""
        if not self._records.flush(_TIMEOUT_S):
            logger.warning("the last files in <run>/samples were not written in %g s", _TIMEOUT_S)
        self._traces.flush(_TIMEOUT_S)
