"""Conversion of ``sys.exit`` in a user's function into an ordinary error of that function.

``SystemExit`` ends a thread or an actor without a message. It also stops an event loop that thousands of requests
share. All calls of user code convert it to :class:`UserExit`, which is handled like any other exception of that code.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

__all__ = ["UserExit", "exit_is_error", "exits_are_errors", "user_frames"]

Class = TypeVar("Class", bound=type)

_LIBRARIES = (f"{Path(__file__).parents[1]}/", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Traceback frames outside of slime and libraries, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]


class UserExit(RuntimeError):
    """A user's function raised ``SystemExit`` or another exception that ``except Exception`` does not catch."""


@contextlib.contextmanager
def exit_is_error() -> Iterator[None]:
    """Convert such exceptions to :class:`UserExit`, except cancellation and Ctrl-C in the main thread.

    Raises:
        UserExit: with the function, file and line that exited.
    """
    try:
        yield
    # CancelledError and GeneratorExit derive from BaseException, but they are control flow and must pass.
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if is_interrupt and threading.current_thread() is threading.main_thread():
            raise
        # the innermost frame of user code, or of any code if a library exits
        frame = (user_frames(error) or traceback.extract_tb(error.__traceback__))[-1]
        what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {error!r}"
        raise UserExit(
            f"{frame.name} ({frame.filename}:{frame.lineno}) {what}, which would end the whole process: raise an "
            "error such as ValueError instead"
        ) from error


def exits_are_errors(cls: Class) -> Class:
    """Wrap every method of a class in :func:`exit_is_error`. For Ray actors that call user code."""
    for name, method in list(vars(cls).items()):
        # static and class methods are not functions in vars(): they stay unchanged
        if inspect.isfunction(method) and not name.startswith("__"):
            setattr(cls, name, exit_is_error()(method))
    return cls
