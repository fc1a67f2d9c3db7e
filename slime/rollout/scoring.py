"""Rewards of generated samples: samples without a reward are scored; those that cannot be scored are given up.

Called by the rollout once generation and sample hooks are through. Knows no engine.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.data.sample import Sample, iter_samples
from slime.observability.trace_utils import trace_span
from slime.rollout.failures import failed_reward, give_up, is_given_up
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.calling import reward_value
from slime.utils.errors import ScoringError

__all__ = ["score", "score_group"]


async def score(args: Namespace, result: Any) -> None:
    """Fill in the missing rewards of one sample, or of the samples of one execution. Aborted ones stay as they are."""
    samples = list(iter_samples(result))
    if any(sample.status is Sample.Status.ABORTED for sample in samples):
        return
    _check_own(args, samples)
    missing = _without_failed(args, [sample for sample in samples if sample.reward is None])
    if missing:
        with trace_span(missing, "reward_model"):
            await _score(args, missing, are_together=isinstance(result, list))


async def score_group(args: Namespace, group: Any) -> None:
    """``--group-rm``: the rewards of all samples of a prompt, in one call."""
    samples = _without_failed(args, list(iter_samples(group)))
    if samples:
        with trace_span(samples, "group_reward_model"):
            await _score(args, samples, are_together=True)


def _check_own(args: Namespace, samples: Sequence[Sample]) -> None:
    """Rewards that a generate function set follow the same rule as those of reward functions."""
    for sample in samples:
        if sample.reward is not None and not is_given_up(sample):
            try:
                sample.reward = reward_value(args, sample.reward, f"the generate function of sample {sample.index}")
            except ScoringError as error:
                sample.reward = failed_reward(args)
                give_up(sample, "reward", error, str(error))


def _without_failed(args: Namespace, samples: Sequence[Sample]) -> list[Sample]:
    """Samples whose generation failed are not shown to reward functions."""
    for sample in filter(is_given_up, samples):
        sample.reward = failed_reward(args)
    return [sample for sample in samples if not is_given_up(sample)]


async def _score(args: Namespace, samples: Sequence[Sample], *, are_together: bool) -> None:
    try:
        rewards = await batched_async_rm(args, samples) if are_together else [await async_rm(args, samples[0])]
    except ScoringError as error:
        rewards = [failed_reward(args)] * len(samples)
        for sample in samples:
            give_up(sample, "reward", error.__cause__ or error, str(error))
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
