"""Public alias of the engine's flags and of their check."""

from __future__ import annotations

from slime.backends.sglang_utils.flags import EngineArgs
from slime.ray.arguments import validate_sglang_args as validate_args

__all__ = ["EngineArgs", "validate_args"]
