"""Samples and prompts. ``Sample`` and the data sources are importable from here. Each loads on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.data.prompts import Dataset
    from slime.data.sample import Sample

__all__ = ["Dataset", "RolloutDataSource", "RolloutDataSourceWithBuffer", "Sample"]

_HOMES = {
    "Dataset": "slime.data.prompts",
    "RolloutDataSource": "slime.rollout.data_source",
    "RolloutDataSourceWithBuffer": "slime.rollout.data_source",
    "Sample": "slime.data.sample",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
