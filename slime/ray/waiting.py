"""``ray.get`` with a deadline and a name. No other module of this room waits on Ray without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from slime.utils.deadline import Deadline

__all__ = ["get"]


def get(refs: Any, seconds: float, what: str, fix: str = "") -> Any:
    """The values of ``refs`` (one ref or a list).

    A failed ref raises its own error at once, even while others still run: ``ray.get`` on a list would otherwise sit in
    the first one until it returns.

    Raises:
        DeadlineExceeded: "gave up after N s waiting for <what>".
    """
    deadline = Deadline(seconds, what, fix)
    is_list = isinstance(refs, Sequence)
    pending = list(refs) if is_list else [refs]
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=deadline.remaining)
        if not done:
            raise deadline.error(f"{len(pending)} of {len(refs) if is_list else 1} calls have not returned")
        ray.get(done)
    try:
        return ray.get(list(refs) if is_list else refs, timeout=max(1.0, deadline.remaining))
    except GetTimeoutError:
        raise deadline.error() from None
