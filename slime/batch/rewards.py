"""Raw rewards, and rewards relative to their group. Called when samples become a batch."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from slime.algorithms import default_estimator, find_estimator
from slime.data.sample import Sample
from slime.data.values import reward_number
from slime.utils.errors import DataError

_STD_EPSILON = 1e-6  # keeps the division finite for rewards that are almost equal
_PATIENCE = 3  # rollouts in a row

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardArgs:
    """The settings of rewards; the names are those of the flags, so ``from_args(RewardArgs, args)`` works."""

    reward_key: str | None = None
    advantage_estimator: str = default_estimator()
    rewards_normalization: bool = True
    grpo_std_normalization: bool = True
    n_samples_per_prompt: int = 1

    @property
    def is_centered(self) -> bool:
        return self.rewards_normalization and find_estimator(self.advantage_estimator).is_centered

    @property
    def is_scaled(self) -> bool:
        is_scaled = self.grpo_std_normalization and find_estimator(self.advantage_estimator).is_scaled
        return self.is_centered and is_scaled


class SignalWatch:
    """Warns if nothing is learned, if it ``applies``: three rollouts in a row without a group whose rewards differ."""

    def __init__(self, applies: bool) -> None:
        self._applies = applies
        self._num_flat = 0

    def check(self, rollout_id: int, rewards: Sequence[float], raw: Sequence[float]) -> None:
        """
        Args:
            rewards: of one rollout, normalized by group. A group of equal rewards has 0 exactly.
            raw: the same as the reward function gave them.
        """
        self._num_flat = 0 if any(rewards) else self._num_flat + 1
        # again after every third rollout, so that the warning is neither lost nor in every line of the log
        if self._applies and self._num_flat and self._num_flat % _PATIENCE == 0:
            logger.warning(
                "rollout %d: nothing is learned: for %d rollouts no prompt had responses with different rewards (here "
                "all are between %g and %g). Compare responses, labels and rewards in the logged samples or with "
                "slime board: the reward function may not fit the format of the responses, or the prompts may be too "
                "easy or too hard",
                *(rollout_id, self._num_flat, min(raw, default=0), max(raw, default=0)),
            )


def raw_rewards(samples: Sequence[Sample], settings: RewardArgs) -> list[float]:
    """The reward of every sample (``--reward-key`` of a dict reward).

    Raises:
        DataError: a reward that is missing or breaks the rule of :mod:`slime.data.values`, with its sample.
    """
    return [_reward_of(sample, settings) for sample in samples]


def normalize_by_group(
    rewards: Sequence[float], keys: Sequence[Hashable], *, divide_by_std: bool, epsilon: float = _STD_EPSILON
) -> list[float]:
    """``(r - mean) / (std + epsilon)`` within each group, std unbiased (n - 1). The division is optional.

    The rewards of a group of one, and of a group whose rewards are all equal, become 0. Groups may have different
    sizes and need not be contiguous.

    Source: DeepSeekMath (GRPO), arXiv:2402.03300, section 4.1.2; without the division: Dr. GRPO, arXiv:2503.20783.
    """
    members: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(key, []).append(position)
    out = [0.0] * len(rewards)
    for positions in members.values():
        values = [rewards[p] for p in positions]
        # 0 exactly, without the rounding error of a mean: SignalWatch counts on it
        if all(value == values[0] for value in values):
            continue
        # fsum is exact, so the order of the samples does not change the result
        mean = math.fsum(values) / len(values)
        scale = statistics.stdev(values, mean) + epsilon if divide_by_std else 1.0
        for position, value in zip(positions, values, strict=True):
            out[position] = (value - mean) / scale
    return out


def group_keys(samples: Sequence[Sample], n_samples_per_prompt: int) -> list[Hashable]:
    """The group of every sample: its ``group_index``. If no sample has one, groups are consecutive blocks of n.

    Raises:
        DataError: some samples have a group index and some do not, or the blocks do not come out even.
    """
    missing = [s for s in samples if s.group_index is None]
    if not missing:
        return [s.group_index for s in samples]
    if len(missing) < len(samples):
        raise DataError(
            f"{len(missing)} of {len(samples)} samples have no group_index (the first is sample {missing[0].index}): a "
            "rollout function or data source must set it on all samples or on none"
        )
    if len(samples) % n_samples_per_prompt:
        raise DataError(
            f"{len(samples)} samples without group_index do not divide into groups of --n-samples-per-prompt "
            f"{n_samples_per_prompt}: set Sample.group_index"
        )
    # data sources without group indices give the samples of a prompt one after the other
    return [position // n_samples_per_prompt for position in range(len(samples))]


def _reward_of(sample: Sample, settings: RewardArgs) -> float:
    where = f"sample {sample.index} (group {sample.group_index})"
    if settings.reward_key and not (isinstance(sample.reward, dict) and settings.reward_key in sample.reward):
        have = f"keys {sorted(sample.reward)}" if isinstance(sample.reward, dict) else f"reward {sample.reward!r}"
        raise DataError(f"{where} has {have}, but --reward-key {settings.reward_key} asks for that entry of a dict")
    value = sample.get_reward_value(settings)
    hint = "; name an entry with --reward-key" if isinstance(value, dict) else ""
    try:
        return float(reward_number(value))
    except ValueError as error:
        raise DataError(f"{where}: {error}{hint}") from None
