"""Public alias: an older path of ``slime.rollout.data_source``."""

from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer

__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer"]
