"""Qwen3-VL with its vision tower, named by ``--spec``: for tools, which have no ``--multimodal-keys``."""

from __future__ import annotations

from slime_plugins.models.qwen3_5_vl import get_qwen3_5_vl_model_provider as get_qwen3_vl_model_provider

__all__ = ["get_qwen3_vl_model_provider"]
