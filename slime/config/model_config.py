"""``config.json`` of a Hugging Face checkpoint, as far as flags follow from it.

For derivations, rules and the plan. Whether the file is there and readable is the subject of a rule of its own
(``slime.config.check.generation``), so here a bad file is an empty one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["indexer_layers", "read_model_config", "text_part"]


def read_model_config(hf_checkpoint: str | None) -> dict[str, Any]:
    """Keys of the file; empty where there is none, or none that can be read."""
    if hf_checkpoint is None:
        return {}
    try:
        config = json.loads((Path(hf_checkpoint) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the language model: those of ``text_config`` in a model that sees, too, else all."""
    part = config.get("text_config") or config
    return part if isinstance(part, dict) else {}


def indexer_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Which layers of a model with sparse attention have an indexer; the others take the choice of a layer before them.

    By a list or a text such as FFSS (full, shared), else every so many layers behind the first few (GLM-5.2).
    """
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if isinstance(kinds, list | str):
        return tuple(str(kind).upper().startswith("F") for kind in kinds)
    freq, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2)
    return tuple(max(layer - offset + 1, 0) % freq == 0 for layer in range(num_layers))
