"""Public alias: ``from slime.utils.types import Sample``."""

from slime.data.columns import TrainData as RolloutBatch
from slime.data.media import MultimodalType, MultimodalTypes
from slime.data.sample import Sample, SampleGroup, SampleStatus, iter_samples
from slime.rollout.sglang_rollout import GenerateState

__all__ = [
    "GenerateState",
    "MultimodalType",
    "MultimodalTypes",
    "RolloutBatch",
    "Sample",
    "SampleGroup",
    "SampleStatus",
    "iter_samples",
]
