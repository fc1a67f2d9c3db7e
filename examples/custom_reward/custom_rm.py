"""Custom rewards in every form that ``--custom-rm-path`` accepts. The task: the sum of two numbers.

    --custom-rm-path examples/custom_reward/custom_rm.py                     reward_func, one sample per call
    --custom-rm-path examples/custom_reward/custom_rm.py --group-rm          batched_custom_rm, a prompt's samples
    --custom-rm-path examples/custom_reward/custom_rm.py:CustomRewardModel   a class, instantiated once per process

A function may be ``async`` (network) or plain (computing, in a thread). Either may take ``--rm-timeout`` seconds.
It returns a number, or a dict in which ``--reward-key`` names the entry for training.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.data import Sample

__all__ = ["CustomRewardModel", "batched_custom_rm", "closeness", "keep_mixed_groups", "reward_func"]


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """1 for the right number, up to 0.5 for one that comes close."""
    await asyncio.sleep(0)  # here you would ask another service
    return closeness(sample.response, sample.label)


async def batched_custom_rm(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    """The same with the group in view: of the right answers the shortest is worth most."""
    lengths = [sample.response_length for sample in samples]
    rewards = []
    for sample, length in zip(samples, lengths, strict=True):
        reward = closeness(sample.response, sample.label)
        # At most 0.1 less, so that a long right answer is still better than any wrong one.
        rewards.append(reward - 0.1 * (length - min(lengths)) / max(1, *lengths) if reward == 1.0 else reward)
    return rewards


class CustomRewardModel:
    """A simple substitute for a reward model: loaded once, called with many responses at a time."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_path)  # here you would load its weights too

    def compute_reward(self, prompts: Sequence[str], responses: Sequence[str], labels: Sequence[Any]) -> list[float]:
        """One reward per response, in order."""
        return [closeness(response, label) for response, label in zip(responses, labels, strict=True)]


def closeness(response: str, label: Any) -> float:
    """Score a number: 1 for the label, 0.5 times the share of right digits for the same length, else 0."""
    if label is None:
        # A failed sample. str(None) would be an answer to compare with.
        raise ValueError("the row has no label")
    answer, label = response.strip(), str(label)
    if answer == label:
        return 1.0
    if not answer.isdigit() or len(answer) != len(label):
        return 0.0
    return 0.5 * sum(a == b for a, b in zip(answer, label, strict=True)) / len(label)


def keep_mixed_groups(args: Namespace, samples: list[Sample], **kwargs: Any) -> bool:
    """``--dynamic-sampling-filter-path``: a group whose rewards are all equal teaches nothing."""
    return len({sample.get_reward_value(args) for sample in samples}) > 1
