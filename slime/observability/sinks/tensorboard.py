"""TensorBoard event files, written with tensorboard's own writer: torch's would cost the driver an import of torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slime.utils.errors import ConfigError

__all__ = ["TensorboardSink"]


class TensorboardSink:
    """Scalars under their metric's name. The file is created by the first record."""

    def __init__(self, directory: Path) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigError("event files need the package tensorboard: pip install tensorboard.")
        self._directory = directory
        self._writer: Any = None

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if isinstance(value, int | float)
        ]
        if not values:
            return
        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._directory))
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
