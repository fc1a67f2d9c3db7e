"""A failure is data: a sample with status FAILED and the address of what went wrong, which is not trained on.

Generation is tried again from the prompt before a sample is given up; a request that the engine refuses, and a reward
that cannot be had, are not. Too many failed samples end the rollout, with one error that names sample, function and
cause. Errors that concern the whole run (bad data, dead engines, deadlines) are raised at once.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from slime.data.sample import Sample, iter_samples
from slime.observability.trace_utils import trace_next_attempt
from slime.rollout.settings import setting
from slime.utils.errors import DataError, RequestRefused, SlimeError

__all__ = [
    "FailureBudget",
    "failed_reward",
    "fresh_copy",
    "generate_with_retries",
    "give_up",
    "is_given_up",
    "request_retries",
    "reward_keys",
    "without_response",
]

logger = logging.getLogger(__name__)

_REQUEST_RETRIES = 8  # with the pauses of http_utils about 20 s, then the engines count as gone
_LONGEST_PAUSE_S = 5.0  # of http_utils

_GENERATED = (
    *("response", "response_length", "reward", "loss_mask", "weight_versions", "rollout_log_probs", "status"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts", "teacher_log_probs"),
    *("remove_sample", "non_generation_time", "spec_info", "prefix_cache_info"),
)
"""Fields of a sample that a rollout fills in."""

# Thousands of samples are copied several times per rollout: what needs no deepcopy does not get one.
_SHARED = frozenset({"multimodal_inputs", "multimodal_train_inputs"})
_FLAT_LISTS = frozenset({"tokens", "loss_mask", "rollout_log_probs", "weight_versions"})
_COUNTERS = (Sample.SpecInfo, Sample.PrefixCacheInfo)
_COPIED = (dict, list, *_COUNTERS)


def fresh_copy(sample: Sample) -> Sample:
    """A copy that generation can change without changing ``sample``. Media are shared: nobody writes to them."""
    twin = object.__new__(type(sample))
    for name, value in vars(sample).items():
        if name in _SHARED or not isinstance(value, _COPIED):
            copied = value
        elif isinstance(value, _COUNTERS):
            copied = copy.copy(value) if any(vars(value).values()) else type(value)()
        elif name in _FLAT_LISTS:
            copied = value.copy()
        else:
            copied = copy.deepcopy(value) if value else type(value)()
        setattr(twin, name, copied)
    return twin


def without_response(sample: Sample) -> Sample:
    """A copy as it was before anything was generated for it; the tokens of its prompt stay."""
    copied = fresh_copy(sample)
    blank = Sample()
    for name in _GENERATED:
        setattr(copied, name, getattr(blank, name))
    vars(copied).pop("stop_text", None)
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
    attempt: Callable[[], Awaitable[Any]], samples: Sequence[Sample], *, retries: int, what: str
) -> Any:
    """The result of ``attempt()``; None after the last failure: the samples are given up then.

    Failed attempts are counted in ``metadata["failed_attempts"]``. Errors that concern the whole run (bad data, engines
    that are gone, deadlines) are raised.

    Args:
        attempt: generates for ``samples`` and may change them; they are as they were before every attempt.
        retries: attempts after the first one.
        what: name of the function, for the message.
    """
    originals = [fresh_copy(sample) for sample in samples]
    names = ", ".join(str(sample.index) for sample in samples)
    for failed in range(1, retries + 2):
        try:
            return await attempt()
        except RequestRefused as error:
            last: Exception = error
            message = str(error)
            is_hopeless = True
        except SlimeError:
            raise
        except Exception as error:  # users' code may raise anything
            last = error
            message = (
                f"{what} raised on sample {names} in {failed} attempts (--max-sample-retries {retries}), last "
                f"{type(error).__name__}: {error}"
            )
            is_hopeless = failed > retries
            logger.warning("%s", message, exc_info=error if is_hopeless else None)
        for sample, original in zip(samples, originals, strict=True):
            trace = (
                {"trace": sample.trace} if hasattr(sample, "trace") else {}
            )  # the spans around the attempts go on in it
            vars(sample).clear()
            vars(sample).update(vars(fresh_copy(original)) | trace)
            sample.metadata["failed_attempts"] = failed
            trace_next_attempt(sample)
        if is_hopeless:
            break
    for sample in samples:
        give_up(sample, "generate", last, message)
    return None


def give_up(sample: Sample, boundary: str, error: BaseException, message: str) -> None:
    """Mark a sample as failed for good: it keeps its place in the group, but nothing is learned from it.

    One that has no response gets a masked token, because a training row needs one.
    """
    sample.status = Sample.Status.FAILED
    sample.remove_sample = True
    sample.metadata["failure"] = {"boundary": boundary, "type": type(error).__name__, "message": message}
    if sample.response_length == 0:
        sample.tokens = [*(sample.tokens or [0]), 0]
        sample.response_length, sample.loss_mask, sample.rollout_log_probs = 1, [0], [0.0]
    logger.warning("sample %s is given up: %s", sample.index, message)


def is_given_up(sample: Sample) -> bool:
    """Whether :func:`give_up` marked it."""
    return sample.status is Sample.Status.FAILED and "failure" in sample.metadata


def failed_reward(args: Any) -> Any:
    """The reward of a failed sample: 0, under the keys that are read."""
    keys = reward_keys(args)
    return dict.fromkeys(keys, 0.0) if keys else 0.0


def reward_keys(args: Any) -> list[str]:
    """The entries of reward dicts that are read; none where rewards are numbers."""
    return [key for key in (setting(args, "reward_key"), setting(args, "eval_reward_key")) if key]


class FailureBudget:
    """How many samples of one rollout, or of one evaluation, may fail for good before it ends with an error.

    Attributes:
        num_failed: samples given up so far.
    """

    def __init__(self, share: float, num_wanted: int) -> None:
        self._share = share
        self._num_wanted = num_wanted
        self.num_failed = 0

    def check(self, group: Any) -> None:
        """Count the failed samples of a finished group.

        Raises:
            DataError: there are too many; with the last one's cause.
        """
        failed = [sample for sample in iter_samples(group) if is_given_up(sample)]
        self.num_failed += len(failed)
        if failed and self.num_failed > self._share * self._num_wanted:
            raise DataError(
                f"{failed[-1].metadata['failure']['message']}. {self.num_failed} of {self._num_wanted} samples failed, "
                f"and --max-failed-share {self._share:g} allows {int(self._share * self._num_wanted)}"
            )
