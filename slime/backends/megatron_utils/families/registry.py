"""All model families, by Hugging Face ``model_type``. To add one: a file with its table, a line here, two tests."""

from __future__ import annotations

from slime.backends.megatron_utils.families.base import Family
from slime.backends.megatron_utils.families.llama import LLAMA
from slime.backends.megatron_utils.families.qwen2 import QWEN2
from slime.backends.megatron_utils.families.qwen3 import QWEN3

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3)}
