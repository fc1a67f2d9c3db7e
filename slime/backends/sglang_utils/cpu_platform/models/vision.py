"""SGLang's own vision-language models, re-exported under the name its registry looks for."""

from __future__ import annotations

from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration

__all__ = ["EntryClass"]

EntryClass = [Qwen3VLForConditionalGeneration]
