"""SGLang's own mixtures of experts, re-exported under the name its registry looks for."""

from __future__ import annotations

from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

__all__ = ["EntryClass"]

EntryClass = [Qwen2MoeForCausalLM, Qwen3MoeForCausalLM]
