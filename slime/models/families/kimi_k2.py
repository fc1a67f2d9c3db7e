"""Kimi K2: the architecture of DeepSeek-V3."""

from dataclasses import replace

from slime.models.families.deepseek_v3 import DEEPSEEK_V3

KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", models="Kimi-K2", particulars="as `deepseek_v3`")
