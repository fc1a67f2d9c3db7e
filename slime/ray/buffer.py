"""Public alias: an older name of the data source with a buffer."""

from slime.rollout.data_source import RolloutDataSourceWithBuffer as Buffer

__all__ = ["Buffer"]
