"""The Megatron flags, in Megatron's spellings, as argument groups.

Megatron-LM is not installed, only megatron-core. Flags that this trainer reads are declared in ``model`` and in
``slime.backends.training.arguments``. Every other option of Megatron is known by name (``other``), so that its values
are consumed and using it is an error instead of a typo. Imports neither torch nor megatron.
"""

from __future__ import annotations

from slime.backends.megatron_utils.arguments.model import (
    ExpertArgs,
    LatentAttentionArgs,
    ModelArgs,
    MuonArgs,
    PositionArgs,
    PredictionArgs,
)
from slime.backends.megatron_utils.arguments.other import other_flags as other_flags
from slime.backends.megatron_utils.arguments.other import runtime_flags
from slime.backends.training.arguments import (
    CheckpointArgs,
    LoraArgs,
    OptimizerArgs,
    ParallelArgs,
    PluginArgs,
    PrecisionArgs,
    TrainerArgs,
)

RuntimeArgs = runtime_flags()

GROUPS = (
    CheckpointArgs,
    ExpertArgs,
    LatentAttentionArgs,
    LoraArgs,
    ModelArgs,
    MuonArgs,
    OptimizerArgs,
    ParallelArgs,
    PluginArgs,
    PositionArgs,
    PrecisionArgs,
    PredictionArgs,
    RuntimeArgs,
    TrainerArgs,
)
