"""The vision tower: the module of ``transformers``, without weights. Called by ``vision_model``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slime.utils.torchvision_cpu import install as allow_torchvision_on_cpu

__all__ = ["build_tower"]


def build_tower(model_type: str, config: Mapping[str, Any], *, recomputes: bool) -> torch.nn.Module:
    """The tower that ``vision_config`` describes: ``(pixel_values, grid_thw=...)`` -> ``pooler_output`` ``[f, h]``.

    Args:
        model_type: of the tower; older checkpoints name their own in its place.
        recomputes: the backward pass computes the blocks' activations again.
    """
    allow_torchvision_on_cpu()
    from transformers import AutoConfig, AutoModel

    settings = {name: value for name, value in config.items() if name != "model_type"}
    tower = AutoModel.from_config(
        AutoConfig.for_model(model_type, **settings), dtype=torch.float32, attn_implementation="sdpa"
    )
    if recomputes:
        tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return tower
