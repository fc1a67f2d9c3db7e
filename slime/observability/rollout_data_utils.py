"""Public alias: ``from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay``."""

from slime.data.routed_experts import validate_rollout_routed_experts_for_replay

__all__ = ["validate_rollout_routed_experts_for_replay"]
