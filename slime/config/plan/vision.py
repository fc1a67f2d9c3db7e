"""How many parameters a vision tower has, from ``vision_config`` of config.json. Called by ``shape``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["tower_parameters"]


def tower_parameters(config: Mapping[str, Any]) -> int:
    """Of Qwen3-VL's and Qwen3.5's towers: patches, positions, blocks, and the mergers of neighbouring patches.

    What config.json leaves out is as in the config classes of transformers.
    """
    hidden, ffn = config.get("hidden_size", 1152), config.get("intermediate_size", 4304)
    merged = hidden * config.get("spatial_merge_size", 2) ** 2
    patch = config.get("in_channels", 3) * config.get("temporal_patch_size", 2) * config.get("patch_size", 16) ** 2
    attention = 4 * hidden * hidden + 4 * hidden
    mlp = 2 * hidden * ffn + hidden + ffn
    block = attention + mlp + 4 * hidden  # two norms with biases
    projections = merged * (merged + 1) + (merged + 1) * config.get("out_hidden_size", 3584)
    deep = len(config.get("deepstack_visual_indexes") or ())
    ends = (patch + 1) * hidden + config.get("num_position_embeddings", 2304) * hidden
    norms = 2 * hidden + deep * 2 * merged  # the deep ones are behind the merging
    return int(ends + config.get("depth", 27) * block + (1 + deep) * projections + norms)
