"""The process-wide timer of plugins: ``timer("name")`` around a block or a function."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

from slime.utils.misc import SingletonMeta

__all__ = ["Timer", "inverse_timer", "timer", "with_defer"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Timer(metaclass=SingletonMeta):
    """Wall-clock seconds by name, one instance per process.

    Starting a phase that runs, or ending one that does not, is an assertion error.

    with timer("train"):
        ...
    seconds = timer.pop()   # {"train": 1.2}; the next report starts from zero
    """

    def __init__(self) -> None:
        self._total: dict[str, float] = {}
        # By name, not by thread: two threads must not time the same name at once.
        self._started: dict[str, float] = {}

    def start(self, name: str) -> None:
        assert name not in self._started, f"timer {name!r} is already running"
        self._started[name] = time.monotonic()

    def end(self, name: str) -> float:
        """Stop ``name`` and add its seconds to the total. Returns the seconds."""
        assert name in self._started, f"timer {name!r} is not running"
        seconds = time.monotonic() - self._started.pop(name)
        self.add(name, seconds)
        return seconds

    def add(self, name: str, seconds: float) -> None:
        self._total[name] = self._total.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block. A block that raises counts as well."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)

    def context(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Time a block."""
        return self(name)

    def log_dict(self) -> dict[str, float]:
        """Totals in seconds by name, without the phases that are still running."""
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


@overload
def timer(name: str) -> contextlib.AbstractContextManager[None]: ...
@overload
def timer(name: Function) -> Function: ...
def timer(name: Any) -> Any:
    """Time a block, ``with timer("x")``, or every call of a function, ``@timer``, under the function's name."""
    if isinstance(name, str):
        return Timer().context(name)
    function = name

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with Timer().context(function.__name__):
            return function(*args, **kwargs)

    return timed


@contextlib.contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Leave a block out of the running phase ``name``."""
    Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)  # also after an error: the outer block ends the phase and asserts that it runs


def with_defer(deferred: Callable[[], Any]) -> Callable[[Function], Function]:
    """Decorator: call ``deferred`` after the function, also if it raises."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                deferred()

        return wrapped  # type: ignore[return-value]

    return decorate
