"""The process-wide timer of plugins: ``timer("name")`` around a block or a function.

slime itself keeps a :class:`slime.observability.timers.Timer` per component; this one is for users' functions, which
have no component to hand one to them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

from slime.observability.timers import Timer as PlainTimer
from slime.utils.misc import SingletonMeta

__all__ = ["Timer", "inverse_timer", "timer", "with_defer"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Timer(PlainTimer, metaclass=SingletonMeta):
    """One per process. Starting what runs, or ending what does not, is an assertion error."""

    def context(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Time a block."""
        return self(name)


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
        Timer().start(name)


def with_defer(deferred: Callable[[], Any]) -> Callable[[Function], Function]:
    """Decorator: call ``deferred`` when the function ends, however it ends."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                deferred()

        return wrapped  # type: ignore[return-value]

    return decorate
