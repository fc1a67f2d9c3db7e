"""Import hook that makes torchvision's CUDA wheel importable with a CPU-only torch.

SGLang and transformers import torchvision, and PyPI has no CPU build of it. At import, torchvision attaches meta
kernels to two operators. Its Python part works on a CPU build of torch if the schemas of these operators exist. Delete
this module when torchvision guards that registration.
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
# A torch Library drops its definitions when it is garbage-collected.
_kept: list[object] = []


def install() -> None:
    """Define the schemas just before torchvision is first imported. Does nothing with a CUDA build of torch."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that finds no module and defines the schemas at the first import of torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            # First, so that the hook acts once even if an import below asks for torchvision again.
            sys.meta_path.remove(self)
            # Local: an import of slime must not import torch before torchvision is needed.
            import torch

            if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
                library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
                for operator in ("nms", "qnms"):
                    library.define(operator + _SCHEMA)
                _kept.append(library)
        return None
