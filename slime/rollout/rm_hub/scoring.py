"""Rewards of generated samples: chooses function or rule, and gives up samples that cannot be scored.

Called by the rollout after generation and sample hooks. Knows no engine.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from slime.config.groups import from_args
from slime.data.sample import Sample, iter_samples
from slime.observability.trace_utils import trace_span
from slime.rollout.arguments import RewardModelArgs
from slime.rollout.base_types import complete_args
from slime.rollout.failures import failed_reward, give_up, is_given_up
from slime.rollout.rm_hub.custom import call_scorer, reward_value, score_batch, score_one
from slime.rollout.rm_hub.grader_pool import LONGEST_CALL_S, grade_limit
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_verl
from slime.rollout.rm_hub.rules import (
    ANSWER_KEYS,
    compute_gpqa_reward,
    f1_score,
    get_deepscaler_rule_based_reward,
    grade_ifbench,
    grade_math_verify,
)
from slime.utils.errors import DataError, RequestRefused, ScoringError
from slime.utils.http_utils import post

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
    "random": lambda *_: random.randint(0, 1),
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
            await _score(args, missing, are_together=isinstance(result, list))


async def score_group(args: Namespace, group: Any) -> None:
    """Score all samples of a prompt in one call (``--group-rm``)."""
    samples = _without_failed(from_args(RewardModelArgs, args).keys, list(iter_samples(group)))
    if samples:
        with trace_span(samples, "group_reward_model"):
            await _score(args, samples, are_together=True)


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


async def _score(args: Namespace, samples: Sequence[Sample], *, are_together: bool) -> None:
    try:
        rewards = await batched_async_rm(args, samples) if are_together else [await async_rm(args, samples[0])]
    except ScoringError as error:
        rewards = [failed_reward(from_args(RewardModelArgs, args).keys)] * len(samples)
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
        return await score_one(args, path, sample, **kwargs)
    return await _score_by_type(from_args(RewardModelArgs, args), sample, functools.partial(remote_rm, args, sample))


async def batched_async_rm(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of samples that are scored together, in their order."""
    path = complete_args(args).custom_rm_path
    # A sample with another reward function is scored by that function.
    if path and all(sample.custom_rm_path in (None, path) for sample in samples):
        return await score_batch(args, path, samples, **kwargs)
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
        response = extract_answer(response) or ""
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
