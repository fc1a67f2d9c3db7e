"""Public alias: ``from slime.utils.context_utils import with_defer``."""

from __future__ import annotations

from slime.observability.timer import with_defer

__all__ = ["with_defer"]
