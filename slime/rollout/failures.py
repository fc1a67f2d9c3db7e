"""Failed samples: status FAILED with the address of the error in the metadata, and no part in training.

Generation is tried again from the prompt before a sample is given up. Not tried again: a request that the engine
refuses, one that exceeds its limit (``--rollout-request-timeout``), and a reward that cannot be computed. Too many
failed samples end the rollout with one error that names sample, function and cause. Errors that concern the whole run
(bad data, dead engines, other deadlines) are raised at once.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from slime.data.sample import Sample, iter_samples
from slime.data.schedule import record
from slime.observability.trace_utils import trace_next_attempt
from slime.utils.errors import DataError, RequestExpired, RequestRefused, SlimeError

logger = logging.getLogger(__name__)

_GENERATED = [
    "response",
    "response_length",
    "reward",
    "loss_mask",
    "weight_versions",
    "rollout_log_probs",
    "status",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
    "teacher_log_probs",
    "remove_sample",
    "non_generation_time",
    "spec_info",
    "prefix_cache_info",
]
"""Fields of a sample that a rollout fills in."""

# Large, and never written: copies share them.
_SHARED = frozenset({"multimodal_inputs", "multimodal_train_inputs"})
# Their items are immutable, so a shallow copy is enough.
_FLAT_LISTS = frozenset({"tokens", "loss_mask", "rollout_log_probs", "weight_versions"})
_COUNTERS = (Sample.SpecInfo, Sample.PrefixCacheInfo)
_COPIED = (dict, list, *_COUNTERS)


def fresh_copy(sample: Sample) -> Sample:
    """A copy that generation can change without changing ``sample``. Media, which no code writes to, are shared."""
    twin = object.__new__(type(sample))
    for name, value in vars(sample).items():
        # Thousands of samples are copied several times per rollout, so deepcopy is the last resort.
        if name in _SHARED or not isinstance(value, _COPIED):
            copied = value
        elif isinstance(value, _COUNTERS):
            copied = copy.copy(value) if any(vars(value).values()) else type(value)()
        elif name in _FLAT_LISTS:
            copied = value.copy()
        elif name == "trace" and isinstance(value, dict):  # not a deepcopy: it grows with each span
            copied = {**value, "events": [{**event, **_own_attrs(event)} for event in value.get("events", ())]}
        else:
            copied = copy.deepcopy(value) if value else type(value)()
        setattr(twin, name, copied)
    return twin


def fresh_group(group: Sequence[Any]) -> list[Any]:
    """Fresh copies of the samples of a group. The rows of one execution stay one entry."""
    return [fresh_copy(entry) if isinstance(entry, Sample) else fresh_group(entry) for entry in group]


def _own_attrs(event: dict[str, Any]) -> dict[str, Any]:
    return {"attrs": dict(event["attrs"])} if "attrs" in event else {}


def traced_copy(sample: Sample) -> Sample:
    """A fresh copy whose spans go to the trace of ``sample``, for a function in a thread."""
    copied = fresh_copy(sample)
    if sample.trace is not None:
        copied.trace = sample.trace  # open spans continue in it
    return copied


def without_response(sample: Sample) -> Sample:
    """A copy from before the first generation. It keeps the tokens of its prompt."""
    copied = fresh_copy(sample)
    blank = Sample()
    for name in _GENERATED:
        setattr(copied, name, getattr(blank, name))
    # Attributes that only some samples have, not fields.
    for name in ("stop_text", "parts"):
        vars(copied).pop(name, None)
    copied.tokens = sample.tokens[: len(sample.tokens) - sample.response_length]
    copied.metadata.pop("start_rollout_id", None)
    return copied


class Attempts:
    """Attempts to generate for ``samples``, which each attempt may change.

        for attempt in Attempts([sample], retries=2, what="generate"):
            with attempt:
                return await function(sample)
        return sample  # given up

    A failed attempt leaves the samples as they were before it, and is counted in ``metadata["failed_attempts"]``. After
    the last one the samples are given up. Errors that concern the whole run are raised.

    Args:
        retries: attempts after the first one.
        what: name of the function, for messages.
    """

    def __init__(self, samples: Sequence[Sample], *, retries: int, what: str) -> None:
        self._samples = samples
        self._originals = [fresh_copy(sample) for sample in samples]
        self._retries = retries
        self._what = what
        self._is_over = False

    def __iter__(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        for number in range(1, self._retries + 2):
            yield self._attempt(number)
            if self._is_over:
                return

    @contextlib.contextmanager
    def _attempt(self, number: int) -> Iterator[None]:
        try:
            yield
        except (RequestRefused, RequestExpired) as error:
            # Another attempt would be refused as well, or take as long.
            self._failed(number, error, str(error), is_last=True)
        except SlimeError:
            # Concerns the whole run: dead engines, bad data, other deadlines.
            raise
        except Exception as error:  # users' code may raise any exception
            names = ", ".join(str(sample.index) for sample in self._samples)
            message = (
                f"{self._what} raised on sample {names} in {number} attempts (--max-sample-retries {self._retries}), "
                f"last {type(error).__name__}: {error}"
            )
            is_last = number > self._retries
            logger.warning("%s", message, exc_info=error if is_last else None)
            self._failed(number, error, message, is_last=is_last)
        else:
            self._is_over = True

    def _failed(self, number: int, error: Exception, message: str, *, is_last: bool) -> None:
        for sample, original in zip(self._samples, self._originals, strict=True):
            # Callers hold the sample object itself, so its attributes are replaced, not the object. The spans around
            # the attempts are still open in its trace.
            trace = {"trace": sample.trace} if sample.trace is not None else {}
            vars(sample).clear()
            vars(sample).update(vars(fresh_copy(original)) | trace)
            sample.metadata["failed_attempts"] = number
            trace_next_attempt(sample)
            if is_last:
                give_up(sample, "generate", error, message)
        if not is_last:
            record("retried", self._samples)
        self._is_over = is_last


def give_up(sample: Sample, boundary: str, error: BaseException, message: str) -> None:
    """Mark a sample as failed. It keeps its place in the group and has no part in the loss."""
    sample.status = Sample.Status.FAILED
    sample.remove_sample = True
    sample.metadata["failure"] = {"boundary": boundary, "type": type(error).__name__, "message": message}
    if sample.response_length == 0:  # a training row needs a response: one masked token
        # [0]: a sample without any token still needs a prompt token.
        sample.tokens = [*(sample.tokens or [0]), 0]
        sample.response_length, sample.loss_mask, sample.rollout_log_probs = 1, [0], [0.0]
    logger.warning("sample %s is given up: %s", sample.index, message)


def is_given_up(sample: Sample) -> bool:
    """Whether :func:`give_up` marked the sample."""
    return sample.status is Sample.Status.FAILED and "failure" in sample.metadata


def failed_reward(keys: Sequence[str]) -> Any:
    """The reward of a failed sample: 0, under each of ``keys`` if there are any."""
    return dict.fromkeys(keys, 0.0) if keys else 0.0


class FailureBudget:
    """The limit of failed samples in one rollout or evaluation.

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
            DataError: there are too many. The message has the cause of the last one.
        """
        failed = [sample for sample in iter_samples(group) if is_given_up(sample)]
        self.num_failed += len(failed)
        if failed and self.num_failed > self._share * self._num_wanted:
            raise DataError(
                f"{failed[-1].metadata['failure']['message']}. {self.num_failed} of {self._num_wanted} samples failed, "
                f"and --max-failed-share {self._share:g} allows {int(self._share * self._num_wanted)}"
            )
