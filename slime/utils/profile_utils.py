"""Public alias: ``from slime.utils.profile_utils import TrainProfiler``."""

from __future__ import annotations

from slime.observability.profile_utils import TrainProfiler

__all__ = ["TrainProfiler"]
