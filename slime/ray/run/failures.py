"""How a run ends badly: the sentence that explains it last on the screen, and a non-zero exit status.

Ray wraps an actor's error into its own type and traceback; for errors that slime raised on purpose only their message
is of use to the reader, so it is taken out again. Everything else keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from slime.ray.watch.failure_report import message_of
from slime.utils.interrupt import interruptible

__all__ = ["exit_status"]


@contextmanager
def exit_status() -> Iterator[None]:
    """Turn expected errors into a message and status 1, Ctrl-C into 130 and SIGTERM into 143 after a stop in order."""
    try:
        with interruptible():
            yield
    except KeyboardInterrupt as interruption:
        print("interrupted: every process of the run was stopped.", file=sys.stderr)
        raise SystemExit(getattr(interruption, "status", 130)) from None
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
