"""The curves of a run, from ``metrics.jsonl``. Called by ``run_data``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from slime.observability.metric_table import MetricEntry, describe

Axis = Literal["rollout", "step", "time", "tokens"]
AXES: tuple[Axis, ...] = get_args(Axis)

# Points per curve that the page receives.
_MOST_POINTS = 600


Place = dict[Axis, float | None]
"""The place of a record on each x axis.

    rollout  number of the rollout; of an evaluation, the number of rollouts before it
    step     optimizer step; of other records, the last one before them
    time     seconds since the start of the run; None for a record without a time
    tokens   response tokens trained on so far
"""


class MetricFile:
    """The metrics of a run. Reads appended lines only. Not thread-safe: needs a lock.

    Args:
        started: unix seconds of the run's last start.
    """

    def __init__(self, path: Path, started: float) -> None:
        self._path = path
        self._started = started
        self._offset = 0
        self._points: dict[str, dict[float, tuple[float, Place]]] = {}
        self._entries: dict[str, MetricEntry | None] = {}
        self._rollout: float | None = None
        self._step: float | None = None
        self._tokens: dict[float, float] = {}
        # Places of steps whose rollout is not reported yet.
        self._open: list[Place] = []

    @property
    def size(self) -> int:
        """Bytes of the file. A change means new lines."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def refresh(self) -> None:
        """Read appended lines. An incomplete line is read the next time."""
        if self.size < self._offset:  # the file was replaced
            self.__init__(self._path, self._started)  # type: ignore[misc]
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
        place = self._place(axis, step, record)
        for name, value in record.items():
            if name in ("time", "step_key", axis) or not isinstance(value, int | float):
                continue
            if name not in self._points:
                self._entries[name] = describe(name)
            _append(self._points.setdefault(name, {}), step, (float(value), place))

    def _place(self, axis: str, step: float, record: dict[str, Any]) -> Place:
        time = record.get("time")
        if time is not None:
            # A resumed run starts later than its first record.
            self._started = min(self._started, time)
            time -= self._started
        if axis == "train/step":
            self._step = step
            # The steps of a rollout are logged together, right before its report.
            rollout = 0.0 if self._rollout is None else self._rollout + 1
            self._open.append({"rollout": rollout, "step": step, "time": time, "tokens": self._num_tokens})
            return self._open[-1]
        if axis == "rollout/step":
            self._rollout = step
            if (tokens := record.get("rollout/response_tokens")) is not None:
                while self._tokens and next(reversed(self._tokens)) >= step:
                    self._tokens.popitem()
                self._tokens[step] = self._num_tokens + tokens
            for place in self._open:
                place |= {"rollout": step, "time": time, "tokens": self._num_tokens}
            self._open.clear()
        rollout = step if axis == "eval/step" or self._rollout is None else self._rollout
        last_step = rollout if self._step is None else self._step
        return {"rollout": rollout, "step": last_step, "time": time, "tokens": self._num_tokens}

    @property
    def _num_tokens(self) -> float:
        return next(reversed(self._tokens.values()), 0.0)

    def series(self, axis: Axis = "rollout") -> dict[str, dict[str, Any]]:
        """``{name: {"x": [...], "y": [...], "unit", "meaning"}}``, some hundred points each.

        A point is the mean of the values at its x, for example of the steps of one rollout. Unit and meaning come from
        the table of metrics. Both are empty for metrics of the user.
        """
        found = {}
        for name, points in sorted(self._points.items()):
            values: dict[float, list[float]] = {}
            for value, place in points.values():
                if (at := place[axis]) is not None:
                    values.setdefault(at, []).append(value)
            xs = sorted(values)
            x, y = thin(xs, [sum(values[key]) / len(values[key]) for key in xs])
            # More digits than a chart shows would double the reply.
            y = [float(f"{value:.6g}") for value in y]
            entry = self._entries[name]
            texts = {"unit": entry.unit, "meaning": entry.meaning} if entry else {"unit": "", "meaning": ""}
            found[name] = {"x": x, "y": y, **texts}
        return found

    def rows(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Every point of some metrics, or of all: its name, its place on each of ``AXES``, its value."""
        for metric in names or sorted(self._points):
            for value, place in self._points.get(metric, {}).values():
                yield metric, *(place[axis] for axis in AXES), value


def _append(points: dict[float, Any], step: float, value: Any) -> None:
    """Add a point. A resumed run repeats steps, and its values replace the earlier ones from there on."""
    while points and next(reversed(points)) >= step:
        points.popitem()
    points[step] = value


def thin(x: list[float], y: list[float], limit: int = _MOST_POINTS) -> tuple[list[float], list[float]]:
    """Keep the lowest and the highest point of each of ``limit / 2`` stretches, so that peaks stay visible."""
    if len(x) <= limit:
        return x, y
    kept: list[int] = []
    stretches = limit // 2
    for stretch in range(stretches):
        places = range(stretch * len(x) // stretches, (stretch + 1) * len(x) // stretches)
        kept += sorted({min(places, key=y.__getitem__), max(places, key=y.__getitem__)})
    return [x[place] for place in kept], [y[place] for place in kept]
