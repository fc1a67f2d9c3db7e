"""A generation that raised is data: a sample with status FAILED and the address of the failure.

It is tried again from its prompt; when that does not help the rollout ends with one error that names sample, function
and cause. Errors that already say what to do (bad data, dead engines, deadlines) are not tried again.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from slime.data.sample import Sample
from slime.utils.errors import DataError, SlimeError

__all__ = ["fresh_copy", "generate_with_retries", "request_retries", "without_response"]

logger = logging.getLogger(__name__)

_REQUEST_RETRIES = 8  # with the pauses of http_utils about 20 s, then the engines count as gone
_LONGEST_PAUSE_S = 5.0  # of http_utils

_GENERATED = (
    *("response", "response_length", "reward", "loss_mask", "weight_versions", "rollout_log_probs", "status"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts", "teacher_log_probs"),
    *("remove_sample", "non_generation_time", "spec_info", "prefix_cache_info"),
)
"""Fields of a sample that a rollout fills in."""


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


def without_response(sample: Sample) -> Sample:
    """A copy as it was before anything was generated for it; the tokens of its prompt stay."""
    copied = fresh_copy(sample)
    blank = Sample()
    for name in _GENERATED:
        setattr(copied, name, getattr(blank, name))
    copied.tokens = sample.tokens[: len(sample.tokens) - sample.response_length]
    copied.metadata.pop("start_rollout_id", None)
    return copied


def request_retries(args: Any) -> int:
    """How often a request to the engines is sent again when none answers.

    With ``--use-fault-tolerance`` it outlives the engines: another one starts, dies once more and starts again.
    """
    if not getattr(args, "use_fault_tolerance", False):  # not a flag of this room: plugins' namespaces lack it
        return _REQUEST_RETRIES
    start_timeout_s: float = args.engine_start_timeout
    return _REQUEST_RETRIES + math.ceil(2 * start_timeout_s / _LONGEST_PAUSE_S)


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
