"""Rewards of generated samples: chooses function or rule, and gives up samples that cannot be scored.

``async_rm`` scores a sample, ``batched_async_rm`` a group. Called by the rollout after generation and sample hooks.
Knows no engine. Accepted forms of ``--custom-rm-path``:

    f(args, sample)                      one sample; under --group-rm it receives the list
    f(args, samples)                     a batch, recognized by the parameter's name
    f(prompts, responses[, labels])      a batch of plain values
    class with compute_reward(...)       made once per process

A function that raises or hangs is a ``ScoringError`` that names it and the sample, which then counts as failed. The
built-in rules are in ``rules`` and ``math_utils``, and keep their deadline in ``grader_pool``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import random
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from slime.config.groups import from_args
from slime.data.sample import Sample, iter_samples
from slime.data.values import Array, check_entries, reward_number
from slime.hooks import accepted_kwargs, annotation, load_function, parameter_names
from slime.observability.trace_utils import trace_span
from slime.rollout.arguments import RewardModelArgs
from slime.rollout.base_types import complete_args
from slime.rollout.failures import failed_reward, give_up, is_given_up, traced_copy
from slime.rollout.rm_hub.grader_pool import LONGEST_CALL_S, grade_limit
from slime.rollout.rm_hub.math_utils import extract_answer as extract_boxed_answer
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.rollout.rm_hub.rules import (
    ANSWER_KEYS,
    compute_gpqa_reward,
    f1_score,
    get_deepscaler_rule_based_reward,
    grade_ifbench,
    grade_math_verify,
)
from slime.rollout.rm_hub.rules import compute_score as compute_score_dapo
from slime.utils.async_utils import Slots, call_user, is_async
from slime.utils.errors import DataError, RequestRefused, ScoringError
from slime.utils.http_utils import post

__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "known_rm_types",
    "remote_rm",
]


# Threads that score at the same time.
_threads = Slots(64)

# One instance per process, because a reward class may hold a model.
_instances: dict[type, Any] = {}


@dataclass(frozen=True)
class RewardFunction:
    """The user's function at ``path``. ``kwargs`` of calls are offered to it: it gets those that it accepts."""

    args: Any
    path: str

    async def of_one(self, sample: Sample, **kwargs: Any) -> Any:
        """The reward of one sample."""
        function = self._resolve()
        if _takes(function) != "sample":
            return (await self._call_batch(function, [sample], kwargs))[0]
        what, timeout_s = f"--custom-rm-path {self.path} on sample {sample.index}", self.args.rm_timeout
        kwargs = accepted_kwargs(function, kwargs)
        value = await call_scorer(function, self.args, sample, what=what, timeout_s=timeout_s, **kwargs)
        return reward_value(self._keys, value, what)

    async def of_batch(self, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
        """The rewards of samples that belong together: a group under ``--group-rm``, or rows of one execution."""
        function = self._resolve()
        # The annotation ``Sample | list[Sample]`` shows that the function handles both.
        takes_list = _takes(function) != "sample" or self.args.group_rm or "list[" in annotation(function, 1)
        if not takes_list:
            return await asyncio.gather(*(self.of_one(sample, **kwargs) for sample in samples))
        return await self._call_batch(function, list(samples), kwargs)

    async def _call_batch(
        self, function: Callable[..., Any], samples: list[Sample], kwargs: dict[str, Any]
    ) -> list[Any]:
        indices = [str(sample.index) for sample in samples]
        what = f"--custom-rm-path {self.path} on samples {', '.join(indices[:8])}{' ...' if len(indices) > 8 else ''}"
        if _takes(function) == "values":
            positional: tuple[Any, ...] = ()
            available = {
                "args": self.args,
                "prompts": [s.prompt for s in samples],
                "responses": [s.response for s in samples],
                "labels": [s.label for s in samples],
                "samples": samples,
                "metadata": [s.metadata for s in samples],
            }
            keywords = {name: available[name] for name in parameter_names(function) if name in available}
        else:
            positional, keywords = (self.args, samples), accepted_kwargs(function, kwargs)
        result = await call_scorer(function, *positional, what=what, timeout_s=self.args.rm_timeout, **keywords)
        if isinstance(result, Array):
            result = result.tolist()
        if not isinstance(result, list | tuple):
            raise ScoringError(
                f"{what} returned {type(result).__name__}; it must return a list with one reward per sample"
            )
        if len(result) != len(samples):
            raise ScoringError(f"{what} returned {len(result)} rewards for {len(samples)} samples")
        return [reward_value(self._keys, value, what) for value in result]

    def _resolve(self) -> Callable[..., Any]:
        """The callable at ``path``; the method of a class."""
        target: Callable[..., Any] = load_function(self.path, "reward", group_rm=self.args.group_rm)
        if not inspect.isclass(target):
            return target
        if target not in _instances:
            # No flag sets rm_model_path. A file of --custom-config-path may.
            offered = {"args": self.args, "model_path": vars(self.args).get("rm_model_path") or self.args.hf_checkpoint}
            _instances[target] = target(**{name: offered[name] for name in parameter_names(target) if name in offered})
        instance = _instances[target]
        for method in (getattr(instance, name, None) for name in ("compute_reward", "reward_func")):
            if method is not None:
                return cast(Callable[..., Any], method)
        return cast(Callable[..., Any], instance.__call__)

    @property
    def _keys(self) -> Sequence[str]:
        return from_args(RewardModelArgs, self.args).keys


def _takes(function: Callable[..., Any]) -> str:
    """``values`` (prompts, responses), ``samples`` or ``sample``."""
    names = parameter_names(function)
    if "prompts" in names and "responses" in names:
        return "values"
    return "samples" if "samples" in names else "sample"


async def call_scorer(function: Callable[..., Any], *args: Any, what: str, timeout_s: float, **kwargs: Any) -> Any:
    """Call ``function`` and await its result. A function that is not async runs in a thread.

    Args:
        what: names function and sample in errors: ``--custom-rm-path a.b on sample 3``.
        timeout_s: seconds from its start.

    Raises:
        ScoringError: it raised, or did not return in time.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        if is_async(function):
            async with limit:
                return await call_user(function, *args, **kwargs)
        # A thread cannot be ended: a late function must not write into samples that the rollout uses again.
        own = [_copied(arg) for arg in args]
        # In this order: waiting for a thread does not count against the limit of the call.
        async with _threads.semaphore, limit:
            result = await call_user(function, *own, **kwargs)
        for arg, copied in zip(args, own, strict=True):
            _take_back(arg, copied)
        return result
    except TimeoutError as error:
        if not limit.expired():  # raised by the function itself
            raise ScoringError(f"{what} raised {type(error).__name__}: {error}") from error
        raise ScoringError(
            f"{what} did not return within {timeout_s:g} s: fix it, or raise --rm-timeout (seconds per call)"
        ) from None
    except DataError:
        # Bad data or a missing library: every sample would fail.
        raise
    except Exception as error:  # the user's code may raise any exception
        raise ScoringError(f"{what} raised {type(error).__name__}: {error}") from error


def _copied(arg: Any) -> Any:
    """Samples, alone or in a list, as copies. Other values are returned unchanged."""
    if isinstance(arg, list):
        return [_copied(item) for item in arg]
    return traced_copy(arg) if isinstance(arg, Sample) else arg


def _take_back(arg: Any, copied: Any) -> None:
    """Apply the changes of a copy to its sample."""
    if isinstance(arg, Sample):
        vars(arg).update(vars(copied))
    elif isinstance(arg, list):
        for item, twin in zip(arg, copied, strict=False):  # the function may have appended to its list
            _take_back(item, twin)


def reward_value(keys: Sequence[str], value: Any, what: str) -> Any:
    """A valid reward by the rule of :mod:`slime.data.values`: a plain number, or a dict.

    Args:
        keys: the entries of reward dicts that are read (:func:`slime.rollout.arguments.RewardModelArgs.keys`).

    Raises:
        ScoringError: it breaks the rule, or is a dict without the entry that is read.
    """
    try:
        if not isinstance(value, dict):
            return reward_number(value)
        if keys and not any(key in value for key in keys):
            have = ", ".join(map(str, value)) or "nothing"
            raise ValueError(f"a dict with the keys {have}, and --reward-key reads {keys[0]!r}")
        return check_entries(value, keys)
    except ValueError as error:
        raise ScoringError(f"{what} returned an invalid reward: {error}") from None


_BOXED = "boxed_"

# For ``remote_rm``, unless ``--rm-timeout`` is longer.
_REMOTE_TIMEOUT_S = 120.0

Rule = Callable[[str, Any, dict[str, Any]], Any]

# Rules that compute with the response must do so in a grader process, which can be ended. The other rules must take
# time proportional to the length of the response.
_RULES: dict[str, Rule] = {
    "math": lambda response, label, _: int(grade_answer_verl(response, label)),
    "math_verify": lambda response, label, _: grade_math_verify(response, label),
    "deepscaler": lambda response, label, _: get_deepscaler_rule_based_reward(response, label),
    "dapo": lambda response, label, _: compute_score_dapo(response, label),
    "f1": lambda response, label, _: f1_score(response, label)[0],
    "gpqa": lambda response, label, metadata: compute_gpqa_reward(response, label, metadata),
    "ifbench": lambda response, _, metadata: grade_ifbench(response, metadata),
    "random": lambda *_: random.SystemRandom().randint(0, 1),  # the state of ``random`` is that of users
}
"""Name -> rule over (response, label, metadata)."""

_BOXED_RULES: dict[str, Rule] = _RULES | {
    "deepscaler": _RULES["math"],
    "dapo": lambda response, label, _: compute_score_dapo(response, label, strict_box_verify=True),
}
"""With the ``boxed_`` prefix: rules that search for another marker grade the box instead."""

_COMPARE_TEXTS = frozenset({"math", "math_verify", "deepscaler", "dapo", "f1"})
_FIND_THE_BOX_THEMSELVES = frozenset({"math", "math_verify", "deepscaler", "dapo"})


def known_rm_types() -> frozenset[str]:
    """Values of ``--rm-type``, without the ``boxed_`` prefix."""
    return frozenset(_RULES) | {"remote_rm"}


async def score(args: Namespace, result: Any) -> None:
    """Fill in the missing rewards of one sample, or of the samples of one execution, unless one is aborted."""
    samples = list(iter_samples(result))
    if any(sample.status is Sample.Status.ABORTED for sample in samples):
        return
    keys = from_args(RewardModelArgs, args).keys
    _check_given_rewards(keys, samples)
    missing = _without_failed(keys, [sample for sample in samples if sample.reward is None])
    if missing:
        with trace_span(missing, "reward_model"):
            together = isinstance(result, list)
            rewards = batched_async_rm(args, missing) if together else asyncio.gather(async_rm(args, missing[0]))
            await _fill(missing, rewards, keys)


async def score_group(args: Namespace, group: Any) -> None:
    """Score all samples of a prompt in one call (``--group-rm``)."""
    keys = from_args(RewardModelArgs, args).keys
    samples = _without_failed(keys, list(iter_samples(group)))
    if samples:
        with trace_span(samples, "group_reward_model"):
            await _fill(samples, batched_async_rm(args, samples), keys)


def _check_given_rewards(keys: Sequence[str], samples: Sequence[Sample]) -> None:
    """Apply the rule for rewards to those that a generate function set."""
    for sample in samples:
        if sample.reward is not None and not is_given_up(sample):
            try:
                sample.reward = reward_value(keys, sample.reward, f"the generate function of sample {sample.index}")
            except ScoringError as error:
                sample.reward = failed_reward(keys)
                give_up(sample, "reward", error, str(error))


def _without_failed(keys: Sequence[str], samples: Sequence[Sample]) -> list[Sample]:
    """The samples whose generation did not fail. Reward functions do not see the others."""
    for sample in filter(is_given_up, samples):
        sample.reward = failed_reward(keys)
    return [sample for sample in samples if not is_given_up(sample)]


async def _fill(samples: Sequence[Sample], scoring: Awaitable[Sequence[Any]], keys: Sequence[str]) -> None:
    try:
        rewards = await scoring
    except ScoringError as error:
        rewards = [failed_reward(keys)] * len(samples)
        for sample in samples:
            # The type in the metadata is that of the cause, not ScoringError.
            give_up(sample, "reward", error.__cause__ or error, str(error))
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample.

    The first of these decides: ``sample.custom_rm_path``, ``--custom-rm-path``, ``metadata["rm_type"]``, ``--rm-type``.

    Raises:
        ScoringError: scoring failed.
        DataError: scoring would fail for every sample, for instance because a library is missing.
        NotImplementedError: no reward is configured, or its type is unknown.
    """
    complete_args(args)
    if path := sample.custom_rm_path or args.custom_rm_path:
        return await RewardFunction(args, path).of_one(sample, **kwargs)
    return await _score_by_type(from_args(RewardModelArgs, args), sample, functools.partial(remote_rm, args, sample))


async def batched_async_rm(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of samples that are scored together, in their order."""
    path = complete_args(args).custom_rm_path
    # A sample with another reward function is scored by that function.
    if path and all(sample.custom_rm_path in (None, path) for sample in samples):
        return await RewardFunction(args, path).of_batch(samples, **kwargs)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


async def _score_by_type(settings: RewardModelArgs, sample: Sample, ask: Callable[[], Awaitable[Any]]) -> Any:
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    rm_type = str(metadata.get("rm_type") or settings.rm_type or "").strip()
    if not rm_type:
        raise NotImplementedError("no reward is configured: give --rm-type or --custom-rm-path")
    name = rm_type.removeprefix(_BOXED)
    what = f"--rm-type {rm_type} on sample {sample.index}"
    if name == "remote_rm":
        return reward_value(settings.keys, await ask(), what)
    if name not in _RULES:
        known = ", ".join(sorted(known_rm_types()))
        raise NotImplementedError(f"reward type {rm_type!r} is unknown; use one of {known}, or --custom-rm-path")
    response = sample.response
    is_boxed = rm_type.startswith(_BOXED)
    if is_boxed and name not in _FIND_THE_BOX_THEMSELVES:
        response = extract_boxed_answer(response) or ""
    rule = (_BOXED_RULES if is_boxed else _RULES)[name]
    label = _label(name, sample.label, metadata, what)
    with grade_limit(settings.rm_timeout) as limit:
        longest_s = LONGEST_CALL_S + limit.wall_s  # the grading process enforces the limit itself
        grade = await call_scorer(rule, response, label, metadata, what=what, timeout_s=longest_s)
    if limit.stopped:
        metadata["grading_stopped"] = limit.stopped
    return grade


def _label(name: str, label: Any, metadata: Mapping[str, Any], what: str) -> Any:
    """The label for the rule ``name``: rules that compare texts get numbers as text.

    Raises:
        ScoringError: a label that cannot be compared with a response.
    """
    is_number = isinstance(label, int) or (isinstance(label, Real) and math.isfinite(label))
    if name in _COMPARE_TEXTS:
        if is_number:
            return str(int(label) if label == int(label) else label)  # 42.0: a column that had gaps
        if isinstance(label, str):
            return label
    elif (
        name != "gpqa"
        or is_number
        or isinstance(label, str)
        or (label is None and any(metadata.get(key) for key in ANSWER_KEYS))
    ):
        return label
    kind = type(label).__name__
    raise ScoringError(
        f"{what}: its label is {str(label)[:80]!r}, a {kind}; this rule needs a text or a number (--label-key)"
    )


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """The JSON reply of the service at ``--rm-url`` to prompt, response and label: a number or a dict.

    Raises:
        ScoringError: the service refused this sample (4xx), or prompt or label have no JSON.
        EngineError, DeadlineExceeded: it does not answer, which concerns every sample.
    """
    complete_args(args)
    if not args.rm_url:
        raise DataError("--rm-type remote_rm needs --rm-url, the address of the service")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    try:
        json.dumps(payload)
    except (TypeError, ValueError) as error:
        raise ScoringError(
            f"--rm-type remote_rm on sample {sample.index}: prompt or label cannot be sent as JSON: {error}. "
            "Convert the column of --label-key to text or numbers"
        ) from error
    try:
        timeout_s = max(_REMOTE_TIMEOUT_S, args.rm_timeout)
        return await post(args.rm_url, payload, max_retries=max_retries, timeout_s=timeout_s)
    except RequestRefused as error:
        raise ScoringError(f"--rm-type remote_rm on sample {sample.index}: {error}") from error
