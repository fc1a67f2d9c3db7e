"""The console of a run: one line per rollout, notes between them, a progress line in place, and a summary.

    rollout   reward     eval    len  trunc   useful  entropy  |dlogp|   grad    gen  train    ETA
      0/30    0.391    0.391    5.0     0%     9/16    0.232    1e-07   1.18   1.1s   1.3s      -
         e.g. reverse aefd -> dfea  (label dfea, reward 1)
         saved outputs/run/checkpoints/iter_0000009 (0.1s)

A line has at most 100 columns, in a narrower terminal at most 80. If not all columns fit, those for seconds are left
out first.
Scripts read ``metrics.jsonl`` instead.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime.algorithms import find_estimator
from slime.observability.sample_record import Example
from slime.observability.terminal import TERMINAL, Terminal

_INDENT = " " * 5
_SAMPLE_EVERY_S = 30.0
_RECENT = 10  # rollouts whose durations give the ETA
_BAR = 16


@dataclass(frozen=True)
class ConsoleArgs:
    """The arguments that decide which columns a run has."""

    advantage_estimator: str | None = None
    debug_rollout_only: bool = False
    debug_train_only: bool = False
    eval_datasets: Sequence[Any] = ()
    eval_interval: int | None = None
    loss_type: str = "policy_loss"
    n_samples_per_prompt: int = 1
    use_kl_loss: bool = False

    @property
    def is_supervised(self) -> bool:
        return self.loss_type == "sft_loss"

    @property
    def compares_siblings(self) -> bool:
        return not (self.advantage_estimator and find_estimator(self.advantage_estimator).needs_critic)

    @property
    def eval_names(self) -> list[str]:
        """Names of the evaluation sets."""
        return [one.name for one in self.eval_datasets or ()] if self.eval_interval is not None else []

    def has(self, column: str) -> bool:
        """Whether ``column`` applies to the run."""
        trains, rewards = not self.debug_rollout_only, not self.is_supervised
        match column:
            case "loss":
                return self.is_supervised
            case "reward" | "trunc":
                return rewards
            case "useful":
                return rewards and self.n_samples_per_prompt > 1 and self.compares_siblings
            case "entropy" | "|dlogp|":
                return trains and rewards
            case "kl":
                return trains and self.use_kl_loss
            case "grad" | "train":
                return trains
            case "gen":
                return rewards and not self.debug_train_only
            case "eval":
                return bool(self.eval_names)
            case _:
                return True


@dataclass(frozen=True)
class Row:
    """One rollout.

    Attributes:
        rollout_id: its number.
        metrics: of the rollout, with their prefix (``rollout/raw_reward``).
        step: of its last optimizer step, without prefix (``loss``). Empty if nothing was trained.
        seconds: by phase: ``rollout``, ``train``.
        num_groups: prompts of the rollout.
        example: one of its samples.
    """

    rollout_id: int
    metrics: Mapping[str, float]
    step: Mapping[str, float]
    seconds: Mapping[str, float]
    num_groups: int = 0
    example: Example | None = None

    @property
    def reward(self) -> float | None:
        return self.metrics.get("rollout/raw_reward", self.metrics.get("rollout/rewards"))

    @property
    def useful(self) -> str | None:
        """Prompts whose responses have different rewards, of all prompts."""
        if not self.num_groups:
            return None
        equal = sum(value for name, value in self.metrics.items() if name.startswith("rollout/zero_std/count_"))
        return f"{self.num_groups - equal:.0f}/{self.num_groups}"


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    text: Callable[[Row], str | None]


def _fixed(value: float | None, digits: int, width: int) -> str | None:
    """Decimals if they fit into ``width`` characters, else an exponent."""
    if value is None:
        return None
    text = f"{value:.{digits}f}"
    return text if len(text) <= width else f"{value:.1e}"


def _magnitude(value: float | None) -> str | None:
    """Small numbers whose order of magnitude matters: ``0``, ``nan``, ``3e-07``."""
    if value is None:
        return None
    return "0" if value == 0 else f"{value:.0e}" if math.isfinite(value) else str(value)


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def duration(seconds: float | None) -> str | None:
    """``1.1s``, ``44s``, ``1m02``, ``3h20``, ``2d04h``."""
    if seconds is None or not math.isfinite(seconds):
        return None
    whole = round(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}"
    days = whole // 86400
    return f"{days}d{whole % 86400 // 3600:02}h" if days < 100 else f"{min(days, 99999)}d"


_COLUMNS = (
    _Column("reward", 9, lambda row: _fixed(row.reward, 3, 8)),
    _Column("loss", 9, lambda row: _fixed(row.step.get("loss"), 4, 8)),
    _Column("eval", 9, lambda row: None),  # filled in by the console
    _Column("len", 7, lambda row: _fixed(row.metrics.get("rollout/response_len/mean"), 1, 6)),
    _Column("trunc", 7, lambda row: _share(row.metrics.get("rollout/truncated_ratio"))),
    _Column("useful", 9, lambda row: row.useful),
    _Column("entropy", 9, lambda row: _fixed(row.step.get("entropy_loss"), 3, 8)),
    _Column("kl", 8, lambda row: _magnitude(row.step.get("kl_loss"))),
    _Column("|dlogp|", 9, lambda row: _magnitude(row.step.get("train_rollout_logprob_abs_diff"))),
    _Column("grad", 8, lambda row: _fixed(row.step.get("grad_norm"), 2, 7)),
    _Column("gen", 7, lambda row: duration(row.seconds.get("rollout"))),
    _Column("train", 7, lambda row: duration(row.seconds.get("train"))),
    _Column("ETA", 7, lambda row: None),
)
_LEFT_OUT = ("gen", "train", "kl", "entropy", "trunc", "useful", "len")  # in this order, until the rest fits


@dataclass
class _Course:
    """First, last and best value of a curve."""

    first: float = math.nan
    last: float = math.nan
    best: float = -math.inf
    best_at: int = 0
    count: int = 0

    def add(self, value: float, at: int, *, is_loss: bool = False) -> None:
        self.first = self.first if self.count else value
        self.last, self.count = value, self.count + 1
        if (-value if is_loss else value) > self.best:
            self.best, self.best_at = -value if is_loss else value, at

    def text(self, name: str) -> str:
        if self.count == 1:
            return f"{name} {self.last:.3f}"
        return f"{name} {self.first:.3f} -> {self.last:.3f}, best {abs(self.best):.3f} at {self.best_at}"


@dataclass
class Console:
    """Writes the lines of one run.

    Attributes:
        settings: decide about the columns.
        run: the run's folder.
        clock: seconds.
        created: the begin of the start.
    """

    settings: ConsoleArgs = field(default_factory=ConsoleArgs)
    run: Path | None = None
    terminal: Terminal = TERMINAL
    clock: Callable[[], float] = time.monotonic
    created: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._began: float | None = None
        self._ends: deque[float] = deque(maxlen=_RECENT + 1)
        self._titles: list[str] = []
        self._sampled = -math.inf
        self._eval: float | None = None
        self._courses: dict[str, _Course] = {}
        self._num_done = self._num_rollout = self._num_rows = 0
        self._written: list[str] = []

    def begin(self, rollout_ids: range) -> None:
        """The start is over: the first of these rollouts follows."""
        if START:
            text, self.created = START.pop()
            self.terminal.line(text)
        self._num_done, self._num_rollout, self._began = rollout_ids.start, rollout_ids.stop, self.clock()
        self._ends.append(self._began)

    def rollout(self, row: Row) -> None:
        """Write the line of a rollout, and one of its samples twice a minute."""
        self._ends.append(self.clock())
        self._num_done, self._num_rows = row.rollout_id + 1, self._num_rows + 1
        value = row.step.get("loss") if self.settings.is_supervised else row.reward
        if value is not None and math.isfinite(value):
            name = "loss" if self.settings.is_supervised else "reward"
            course = self._courses.setdefault(name, _Course())
            course.add(value, row.rollout_id, is_loss=self.settings.is_supervised)
        columns, first = self._chosen()
        titles = [column.title for column in columns]
        if titles != self._titles:  # also after the terminal was made narrower
            self._titles = titles
            self.terminal.line("rollout".rjust(first) + "".join(one.title.rjust(one.width) for one in columns))
        cells = {"eval": _fixed(self._eval, 3, 8) or "", "ETA": duration(self._eta_s()) or "-"}
        texts = [(cells.get(one.title) if one.title in cells else one.text(row) or "-", one.width) for one in columns]
        head = f"{row.rollout_id}/{self._num_rollout}"
        self.terminal.line(head.rjust(first) + "".join(str(text).rjust(width) for text, width in texts))
        self._eval = None
        if row.example is not None and self.clock() - self._sampled >= _SAMPLE_EVERY_S:
            self._sampled = self.clock()
            example = replace(row.example, reward=None) if self.settings.is_supervised else row.example
            self.terminal.line(_INDENT + example.line(self.terminal.width - len(_INDENT)))

    def _chosen(self) -> tuple[list[_Column], int]:
        """The columns that apply and fit, and the width of the first one."""
        first = max(len("rollout"), 2 * len(str(self._num_rollout)) + 1)
        columns = [column for column in _COLUMNS if self.settings.has(column.title)]
        for title in _LEFT_OUT:
            if first + sum(column.width for column in columns) <= self.terminal.width:
                break
            columns = [column for column in columns if column.title != title]
        return columns, first

    def _eta_s(self) -> float | None:
        """Seconds until the last rollout ends, if the next ones take as long as the last ten. None if unknown."""
        left = self._num_rollout - self._num_done
        if left <= 0 or len(self._ends) < 3:  # the first rollout takes longer than the others
            return None
        ends = list(self._ends)[1:]
        return left * (ends[-1] - ends[0]) / (len(ends) - 1)

    def evaluated(self, num_trained: int, metrics: Mapping[str, float]) -> None:
        """Note an evaluation: the next line shows its first set. Several sets, or the last evaluation, get a line."""
        found = {name: metrics[f"eval/{name}"] for name in self.settings.eval_names if f"eval/{name}" in metrics}
        for name, value in found.items():
            self._courses.setdefault(f"eval {name}", _Course()).add(value, num_trained)
        self._eval = next(iter(found.values()), None)
        if len(found) > 1 or (found and num_trained >= self._num_rollout):
            self.note(f"eval after {num_trained} rollouts", [f"{name} {value:.3f}" for name, value in found.items()])

    def saved(self, what: Mapping[str, float], *, goes_on: bool = False) -> None:
        """Note files that were saved: seconds by path.

        Args:
            goes_on: they are written in the background.
        """
        self._written = list(what)
        how = "saving in the background" if goes_on else "saved"
        self.note(how, [f"{shown_path(path)} ({duration(seconds)})" for path, seconds in what.items()])

    def note(self, what: str, parts: Sequence[str]) -> None:
        """A line between those of rollouts: ``what part · part``."""
        for text in joined([f"{what} {parts[0]}", *parts[1:]] if parts else [what], self.terminal.width - len(_INDENT)):
            self.terminal.line(_INDENT + text)

    def progress(self, phases: Iterable[tuple[str, float]]) -> str:
        """The line in place.

        Args:
            phases: activity, with its numbers, and its seconds so far.
        """
        filled = min(_BAR, _BAR * self._num_done // max(self._num_rollout, 1))
        bar = "=" * filled + (">" if filled < _BAR else "") + " " * (_BAR - filled - 1)
        eta = self._eta_s()
        since = 0.0 if not self._ends else self.clock() - self._ends[-1]
        parts = [f"{what} · {seconds:.0f} s" for what, seconds in phases]
        if eta is not None:
            parts.append(f"ETA {duration(max(0.0, eta - since))}")
        return f"=> {self._num_done}/{self._num_rollout} [{bar}] " + " · ".join(parts)

    def finish(self, state: str) -> None:
        """The summary. ``state``: finished, failed, interrupted."""
        began = self.created if self._began is None else self._began
        if self._num_rows:
            start = f" (+{duration(began - self.created)} start)"
            head = f"{state} {counted(self._num_rows, 'rollout')} in {duration(self.clock() - began)}{start}"
            self._lines([head, *(course.text(name) for name, course in self._courses.items())])
        places = [shown_path(path) for path in self._written]
        if self.run is not None and self._num_rows:
            self._lines([*places, f"slime board {shown_path(self.run)}"])

    def _lines(self, parts: Sequence[str]) -> None:
        for text in joined(parts, self.terminal.width):
            self.terminal.line(text)


def joined(parts: Iterable[str], width: int) -> list[str]:
    """The parts with ``·`` between them, in lines of at most ``width`` columns. A longer part gets its own line."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def shown_path(path: Path | str) -> str:
    """``path`` from the working directory if it is below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


@dataclass
class StartTimes:
    """Seconds that the parts of a start take. They run side by side."""

    clock: Callable[[], float] = time.monotonic
    _parts: dict[str, tuple[float, float | None]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._parts)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the text in place inside the block."""
        with TERMINAL.live(self.text):
            yield

    def begin(self, *names: str) -> None:
        self._parts |= {name: (self.clock(), None) for name in names}

    def end(self, name: str) -> None:
        began, ended = self._parts[name]
        self._parts[name] = (began, self.clock() if ended is None else ended)

    def pop(self) -> tuple[str, float]:
        """The last text, and the begin of the first part. The next start of this process begins anew."""
        text = self.text()
        first = min(began for began, _ in self._parts.values())
        self._parts.clear()
        return text, first

    def text(self) -> str:
        """``starting  Ray 2.1s · engines 9.8s ...``: three dots after a part that has not ended."""
        now, parts = self.clock(), list(self._parts.items())
        shown = [
            f"{name} {duration((now if ended is None else ended) - began)}{' ...' if ended is None else ''}"
            for name, (began, ended) in parts
        ]
        return "starting   " + " · ".join(shown)


START = StartTimes()
"""Of the run that this process starts."""
