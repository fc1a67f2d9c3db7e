"""Lets torchvision's CUDA wheel import beside a CPU-only torch.

SGLang and transformers import torchvision, and PyPI has no CPU build of it. Its Python part works on a CPU build of
torch once the schemas of two operators exist, which it wants to attach meta kernels to. Delete when torchvision guards
that registration.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["install"]

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[object] = []
"""A torch Library forgets its definitions when it is collected."""


def install() -> None:
    """Define the schemas just before torchvision is first imported. Does nothing with a CUDA build of torch."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing; notices that torchvision is about to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
                library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
                for operator in ("nms", "qnms"):
                    library.define(operator + _SCHEMA)
                _kept.append(library)
        return None
