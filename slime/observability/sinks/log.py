"""Metrics as lines of the log, for scripts that grep them: ``rollout 3: {...}``, ``perf 3: ...``, ``step 7: ...``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

__all__ = ["LogSink"]

logger = logging.getLogger(__name__)

_CRITIC = "train/critic-"


class LogSink:
    """One line per record and kind; names keep their prefix."""

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        kinds: dict[str, dict[str, Any]] = {}
        for name, value in metrics.items():
            kinds.setdefault(_kind(name), {})[name] = value
        for kind, values in kinds.items():
            logger.info("%s %d: %s", kind, step, values)

    def close(self) -> None:
        """Nothing is open."""


def _kind(name: str) -> str:
    prefix = name.split("/", maxsplit=1)[0]
    if prefix == "train":
        return "critic-step" if name.startswith(_CRITIC) else "step"
    return prefix
