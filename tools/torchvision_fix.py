"""Lets the torchvision wheel of the package index, built for CUDA, be imported beside a CPU-only torch.

What: just before the first ``import torchvision``, declares the two operators whose compiled half such a torch cannot
load. Why: transformers and SGLang import torchvision for its Python part, and the import stops at the missing
operators. Where: ``setup_env.py`` copies this file into ``site-packages`` with a ``.pth`` line, only when the import
fails there. When to delete: when a CPU-only torch has a matching torchvision on every platform.

Started by every Python process of the environment: imports nothing but ``sys``.
"""

from __future__ import annotations

import sys


class _BeforeTorchvision:
    """A finder that finds nothing: Python calls it first, and it declares the missing operators."""

    library = None  # keeps the declarations alive

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision":
            # Before declare(): its imports must not start it again.
            sys.meta_path.remove(cls)
            cls.declare()

    @classmethod
    def declare(cls):
        import torch

        # A second definition of an operator raises an error.
        if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
            return
        cls.library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


# Importing torch here would slow every Python process of the environment by seconds.
sys.meta_path.insert(0, _BeforeTorchvision)
