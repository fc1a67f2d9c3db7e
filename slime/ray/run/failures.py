"""How a run ends badly: the sentence that explains it last on the screen, and a non-zero exit status.

Ray wraps an actor's error into its own type and traceback; for errors that slime raised on purpose only their message
is of use to the reader, so it is taken out again. Everything else keeps its traceback.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayTaskError

from slime.utils.errors import SlimeError
from slime.utils.interrupt import interruptible

__all__ = ["exit_status", "message_of"]


def message_of(error: BaseException) -> str | None:
    """The message for the user, None when ``error`` is a bug that needs its traceback."""
    if isinstance(error, RayTaskError):
        return message_of(error.cause) if isinstance(error.cause, Exception) else None
    if isinstance(error, ObjectStoreFullError | OutOfDiskError):
        return (
            "Ray's object store is full, and so is the disk that it spills to: a rollout's batch has no place. Free "
            f"space in Ray's temporary directory, or make --rollout-batch-size or --async-buffer-size smaller ({error})"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full: {error}. Checkpoints that were complete still are; free space and start again."
    if isinstance(error, RayActorError):
        return f"a process of the run died: {error}"
    return str(error) if isinstance(error, SlimeError) else None


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
