"""Public alias: ``from slime.utils.ray_utils import Box``."""

from __future__ import annotations

from slime.ray.shards import Box

__all__ = ["Box"]
