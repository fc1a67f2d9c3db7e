"""The Megatron flags, in Megatron's spellings, as argument groups.

There is no Megatron-LM here, only megatron-core: flags that this trainer reads or knows are declared by hand in the
modules of this package; every other option of Megatron is known by name (``other``), so that its values are consumed
and using it is an error instead of a typo. Called by the command line; imports neither torch nor megatron.
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
from slime.backends.megatron_utils.arguments.runtime import RuntimeArgs
from slime.backends.training.arguments import (
    CheckpointArgs,
    OptimizerArgs,
    ParallelArgs,
    PluginArgs,
    PrecisionArgs,
    TrainerArgs,
)

GROUPS = (
    CheckpointArgs,
    ExpertArgs,
    LatentAttentionArgs,
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
