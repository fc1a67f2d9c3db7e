"""How a run ends badly: the sentence that explains it last on the screen, and a non-zero exit status.

Ray wraps an actor's error into its own type and traceback; for errors that slime raised on purpose only their message
is of use to the reader, so it is taken out again. Everything else keeps its traceback.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import RayActorError, RayTaskError

from slime.utils.errors import SlimeError

__all__ = ["exit_status", "message_of"]


def message_of(error: BaseException) -> str | None:
    """The message for the user, None when ``error`` is a bug that needs its traceback."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return str(cause) if isinstance(cause, SlimeError) else None
    if isinstance(error, RayActorError):
        return f"a process of the run died: {error}"
    return str(error) if isinstance(error, SlimeError) else None


@contextmanager
def exit_status() -> Iterator[None]:
    """Turn expected errors into a message and status 1, Ctrl-C and SIGTERM into status 130 after an orderly stop."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: every process of the run was stopped.", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
