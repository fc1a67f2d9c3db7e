"""Public alias: ``from slime.utils.iter_utils import group_by``."""

from __future__ import annotations

from slime.utils.misc import group_by

__all__ = ["group_by"]
