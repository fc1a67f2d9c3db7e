"""``metrics.jsonl``: one JSON object per record, for scripts and notebooks; needs no library and no viewer."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["JsonlSink"]


class JsonlSink:
    """Appends ``{"time": seconds, "step_key": "train/step", "train/step": 3, "train/loss": 0.1, ...}`` per record.

    NaN and infinities, which JSON does not have, are written as null. A run that is resumed under the same name goes on
    in the same file.
    """

    def __init__(self, path: Path) -> None:
        ends_torn = _ends_torn(path)
        # a text of a user's metric may hold half of a character
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        if ends_torn:
            self._file.write("\n")

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        record = {"time": round(time.time(), 3), "step_key": step_key, step_key: step}
        record |= {name: _json(value) for name, value in metrics.items()}
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()  # readable while the run goes on, complete when it is killed

    def close(self) -> None:
        self._file.close()


def _ends_torn(path: Path) -> bool:
    """Whether a process was killed while it wrote the last line: the next record would be lost with it."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str) or value is None else str(value)
