"""Named seconds: how long each phase took since the last report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["Timer"]


class Timer:
    """Adds up wall-clock seconds by name.

    with timer("train"):
        ...
    seconds = timer.pop()   # {"train": 1.2}, and the next report starts from zero
    """

    def __init__(self) -> None:
        self._total: dict[str, float] = {}
        self._started: dict[str, float] = {}

    def start(self, name: str) -> None:
        assert name not in self._started, f"timer {name!r} is already running"
        self._started[name] = time.monotonic()

    def end(self, name: str) -> float:
        """Stop ``name``, add what it took to its total, and return what it took, in seconds."""
        assert name in self._started, f"timer {name!r} is not running"
        seconds = time.monotonic() - self._started.pop(name)
        self.add(name, seconds)
        return seconds

    def add(self, name: str, seconds: float) -> None:
        self._total[name] = self._total.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block; it counts also when it raises."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)

    def log_dict(self) -> dict[str, float]:
        """Totals in seconds by name; phases that are still running are not counted."""
        return dict(self._total)

    def reset(self, name: str | None = None) -> None:
        """Forget one total, or all."""
        if name is None:
            self._total.clear()
        else:
            self._total.pop(name, None)

    def pop(self) -> dict[str, float]:
        """Totals since the last ``pop``."""
        totals = self.log_dict()
        self.reset()
        return totals
