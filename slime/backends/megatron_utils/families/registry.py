"""Family name -> its table."""

from __future__ import annotations

from slime.backends.megatron_utils.families import llama, qwen2, qwen3
from slime.backends.megatron_utils.families.base import Family

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (llama, qwen2, qwen3)}
