"""The curves of a run, from its ``metrics.jsonl``; reads only what was appended since the last look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["MetricFile", "thin"]

_MOST_POINTS = 600


class MetricFile:
    """All series of the file. Not thread-safe: the server asks one question at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._points: dict[str, dict[float, float]] = {}
        self._axes: dict[str, str] = {}
        self.last_time: float | None = None

    @property
    def size(self) -> int:
        """Bytes of the file; another number means that there is more to read."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def refresh(self) -> None:
        """Read what is new. A line that is not complete yet is left for the next time."""
        if self.size < self._offset:  # begun anew
            self.__init__(self._path)  # type: ignore[misc]
        if self.size == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            block = file.read()
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            try:
                self._add(json.loads(line))
            except (ValueError, TypeError, KeyError):
                continue  # a line that was cut by a crash

    def _add(self, record: dict[str, Any]) -> None:
        axis = record["step_key"]
        step = float(record[axis])
        self.last_time = record.get("time", self.last_time)
        for name, value in record.items():
            if name in ("time", "step_key", axis) or not isinstance(value, int | float):
                continue
            self._axes[name] = axis
            self._points.setdefault(name, {})[step] = float(value)  # a resumed run writes a step again

    def series(self) -> dict[str, dict[str, Any]]:
        """``{name: {"axis": "train/step", "x": [...], "y": [...]}}``, at most some hundred points each."""
        found = {}
        for name, points in sorted(self._points.items()):
            steps = sorted(points)
            x, y = thin(steps, [points[step] for step in steps])
            found[name] = {"axis": self._axes[name], "x": x, "y": y}
        return found


def thin(x: list[float], y: list[float], limit: int = _MOST_POINTS) -> tuple[list[float], list[float]]:
    """The lowest and the highest point of each of ``limit / 2`` stretches: peaks stay visible."""
    if len(x) <= limit:
        return x, y
    kept: list[int] = []
    stretches = limit // 2
    for stretch in range(stretches):
        places = range(stretch * len(x) // stretches, (stretch + 1) * len(x) // stretches)
        kept += sorted({min(places, key=y.__getitem__), max(places, key=y.__getitem__)})
    return [x[place] for place in kept], [y[place] for place in kept]
