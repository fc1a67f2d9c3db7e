"""How the plan reads the namespace: one place, so that a flag which no room declares reads as "not given"."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

__all__ = ["PlanError", "number", "read"]


class PlanError(ValueError):
    """A section cannot be worked out; the text says why. The rest of the plan is still printed."""


def read(args: Namespace, name: str) -> Any:
    """The value of ``name``; None where the namespace has no such flag."""
    return vars(args).get(name)


def number(args: Namespace, name: str, default: int) -> int:
    """An integer flag; ``default`` where it is unset."""
    value = read(args, name)
    return default if value is None else int(value)
