"""Which reward a sample gets: its own function, the run's function, or a built-in rule by name."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from slime.data.sample import Sample
from slime.rollout.rm_hub.calling import call_scorer, reward_value
from slime.rollout.rm_hub.custom import score_batch, score_one
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import ANSWER_KEYS, compute_gpqa_reward
from slime.rollout.rm_hub.grader_pool import LONGEST_CALL_S, grade_limit
from slime.rollout.rm_hub.ifbench import grade_ifbench
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_verl
from slime.rollout.rm_hub.math_verify_grader import grade_math_verify
from slime.rollout.rm_hub.remote import remote_rm
from slime.rollout.settings import setting
from slime.utils.errors import ScoringError

__all__ = ["async_rm", "batched_async_rm", "known_rm_types"]

logger = logging.getLogger(__name__)

_BOXED = "boxed_"

Rule = Callable[[str, Any, dict[str, Any]], Any]

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
"""Name -> rule over (response, label, metadata). Rules that compute with the response do so in a process that can be
ended; the others take time proportional to its length."""

_BOXED_RULES: dict[str, Rule] = _RULES | {
    "deepscaler": _RULES["math"],
    "dapo": lambda response, label, _: compute_score_dapo(response, label, strict_box_verify=True),
}
"""With the ``boxed_`` prefix: rules that look for a marker of their own grade the box instead."""

_COMPARE_TEXTS = frozenset({"math", "math_verify", "deepscaler", "dapo", "f1"})
_FIND_THE_BOX_THEMSELVES = frozenset({"math", "math_verify", "deepscaler", "dapo"})


def known_rm_types() -> frozenset[str]:
    """Values of ``--rm-type``, without the ``boxed_`` prefix."""
    return frozenset(_RULES) | {"remote_rm"}


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample.

    Order: ``sample.custom_rm_path``, ``--custom-rm-path``, ``metadata["rm_type"]``, ``--rm-type``.

    Raises:
        ScoringError: scoring failed.
        DataError: the reward's library is missing, or another thing that would fail for every sample.
        NotImplementedError: no reward is configured, or its type is unknown.
    """
    path = sample.custom_rm_path or setting(args, "custom_rm_path")
    if path:
        return await score_one(args, path, sample, **kwargs)
    return await _by_type(args, sample)


async def batched_async_rm(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of samples that are scored together, in their order."""
    path = setting(args, "custom_rm_path")
    if path and all(sample.custom_rm_path in (None, path) for sample in samples):
        return await score_batch(args, path, samples, **kwargs)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


async def _by_type(args: Namespace, sample: Sample) -> Any:
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    rm_type = str(metadata.get("rm_type") or setting(args, "rm_type") or "").strip()
    if not rm_type:
        raise NotImplementedError("no reward is configured: give --rm-type or --custom-rm-path")
    name = rm_type.removeprefix(_BOXED)
    what = f"--rm-type {rm_type} on sample {sample.index}"
    if name == "remote_rm":
        return reward_value(args, await remote_rm(args, sample), what)
    if name not in _RULES:
        known = ", ".join(sorted(known_rm_types()))
        raise NotImplementedError(f"reward type {rm_type!r} is unknown; use one of {known}, or --custom-rm-path")
    response = sample.response
    is_boxed = rm_type.startswith(_BOXED)
    if is_boxed and name not in _FIND_THE_BOX_THEMSELVES:
        response = extract_answer(response) or ""
    rule = (_BOXED_RULES if is_boxed else _RULES)[name]
    label = _label(name, sample.label, metadata, what)
    with grade_limit(setting(args, "rm_timeout")) as limit:
        longest_s = LONGEST_CALL_S + limit.wall_s  # the limit itself is kept by the process that grades
        grade = await call_scorer(rule, response, label, metadata, what=what, timeout_s=longest_s)
    if limit.stopped:
        metadata["grading_stopped"] = limit.stopped
    return grade


def _label(name: str, label: Any, metadata: Mapping[str, Any], what: str) -> Any:
    """The label as the rule ``name`` takes it: numbers become text where texts are compared.

    Raises:
        ScoringError: it is nothing that a response could be compared with.
    """
    is_number = isinstance(label, int) or (isinstance(label, Real) and math.isfinite(label))
    if name in _COMPARE_TEXTS:
        if is_number:
            return str(int(label) if label == int(label) else label)  # 42.0: a column that had gaps
        if isinstance(label, str):
            return label
    elif name != "gpqa" or is_number or isinstance(label, str) or (label is None and _has_answer(metadata)):
        return label
    kind = type(label).__name__
    raise ScoringError(
        f"{what}: its label is {str(label)[:80]!r}, a {kind}; this rule needs a text or a number (--label-key)"
    )


def _has_answer(metadata: Mapping[str, Any]) -> bool:
    return any(metadata.get(key) for key in ANSWER_KEYS)
