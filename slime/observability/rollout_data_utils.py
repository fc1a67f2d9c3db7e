"""Public alias of the rollout dumps and of a check of replayed experts (``slime.batch``, ``slime.data``)."""

from slime.batch.replay import load_debug_rollout_data, save_debug_rollout_data
from slime.data.routed_experts import validate_rollout_routed_experts_for_replay

__all__ = ["load_debug_rollout_data", "save_debug_rollout_data", "validate_rollout_routed_experts_for_replay"]
