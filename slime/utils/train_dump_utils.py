"""Public alias: ``from slime.utils.train_dump_utils import save_debug_train_data``."""

from __future__ import annotations

from slime.observability.train_data_utils import save_debug_train_data

__all__ = ["save_debug_train_data"]
