"""Small inputs of the kinds that users' functions get."""

from __future__ import annotations

from typing import Any

from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.rollout.failures import fresh_copy

__all__ = ["GROUP_SIZE", "NUM_GROUPS", "QUESTION", "PromptList", "finished_groups", "fresh_groups"]

NUM_GROUPS = 2
GROUP_SIZE = 2


QUESTION = Sample(prompt="What is 2 + 2?", label="4")


def fresh_groups(row: Sample = QUESTION, count: int = NUM_GROUPS, first: int = 0) -> list[SampleGroup]:
    """Groups that nothing was generated for, with prompt, label and metadata of ``row``."""
    groups: list[SampleGroup] = []
    for number in range(first, first + count):
        group: SampleGroup = [fresh_copy(row) for _ in range(GROUP_SIZE)]
        for position, sample in enumerate(iter_samples(group)):
            sample.index, sample.group_index = number * GROUP_SIZE + position, number
        groups.append(group)
    return groups


def finished_groups(reward_key: str | None, with_reward: bool = True) -> list[SampleGroup]:
    """Groups as they are after generation; the first one has different rewards, the second equal ones."""
    groups = fresh_groups()
    for number, group in enumerate(groups):
        for position, sample in enumerate(iter_samples(group)):
            sample.tokens = [5, 6, 7, 8, 9]
            sample.response_length = 2
            sample.response = "4"
            sample.loss_mask = [1, 1]
            sample.rollout_log_probs = [-0.5, -0.25]
            sample.weight_versions = ["1"]
            sample.status = Sample.Status.COMPLETED
            if with_reward:
                value = float(number == 0 and position == 0)
                sample.reward = {reward_key: value} if reward_key else value
    return groups


class PromptList:
    """A data source without end; remembers what was given back."""

    def __init__(self, row: Sample) -> None:
        self.row = row
        self.num_drawn = 0
        self.returned: list[SampleGroup] = []

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        groups = fresh_groups(self.row, num_samples, self.num_drawn)
        self.num_drawn += num_samples
        return groups

    def add_samples(self, samples: list[SampleGroup]) -> None:
        self.returned += samples

    def save(self, rollout_id: int) -> None:
        pass

    def load(self, rollout_id: int | None = None) -> None:
        pass

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        pass

    def get_metadata(self) -> dict[str, Any]:
        return {}

    def __len__(self) -> int:
        return 1_000_000
