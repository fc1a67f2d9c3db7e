"""A generation that raised is data: a sample with status FAILED and the address of the failure.

It is tried again from its prompt; when that does not help the rollout ends with one error that names sample, function
and cause. Errors that already say what to do (bad data, dead engines, deadlines) are not tried again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from slime.data.sample import Sample
from slime.utils.errors import DataError, SlimeError

__all__ = ["fresh_copy", "generate_with_retries"]

logger = logging.getLogger(__name__)


def fresh_copy(sample: Sample) -> Sample:
    """A copy that generation can change without changing ``sample``. Media are shared: nobody writes to them."""
    twin = copy.copy(sample)
    shared = ("multimodal_inputs", "multimodal_train_inputs")
    for name, value in vars(sample).items():
        if name not in shared and isinstance(value, dict | list):
            setattr(twin, name, copy.deepcopy(value))
    twin.spec_info = copy.copy(sample.spec_info)
    twin.prefix_cache_info = copy.copy(sample.prefix_cache_info)
    return twin


async def generate_with_retries(
    attempt: Callable[[Sample], Awaitable[Any]], sample: Sample, *, retries: int, what: str
) -> Any:
    """The result of ``attempt(sample)``. Failed attempts are counted in ``metadata["failed_attempts"]``.

    Args:
        attempt: generates; may change the sample, which is as it was before every attempt.
        retries: attempts after the first one.
        what: name of the function, for the error.

    Raises:
        DataError: the last attempt raised as well.
    """
    original = fresh_copy(sample)
    for failed in range(retries + 1):
        if failed:
            vars(sample).clear()
            vars(sample).update(vars(fresh_copy(original)))
            sample.metadata["failed_attempts"] = failed
        try:
            return await attempt(sample)
        except SlimeError:
            raise
        except Exception as error:  # users' code may raise anything
            last = error
            sample.status = Sample.Status.FAILED
            sample.metadata["failure"] = {
                "boundary": "generate",
                "type": type(error).__name__,
                "message": str(error),
            }
            logger.warning(
                "%s raised on sample %s (attempt %d of %d): %s: %s",
                *(what, sample.index, failed + 1, retries + 1, type(error).__name__, error),
            )
    raise DataError(
        f"{what} raised on sample {sample.index} in {retries + 1} attempts (--max-sample-retries {retries}), "
        f"last {type(last).__name__}: {last}"
    ) from last
