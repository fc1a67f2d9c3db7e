"""Makes installed packages invisible, except those that a machine with torch, transformers and megatron-core has.

Python imports this file at its start if the folder is in PYTHONPATH.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# Of transformers' requirements those that torch and megatron-core do not have either are missing: no trainer needs them
_PRESENT = {
    *("torch", "torchgen", "triton", "numpy", "safetensors", "megatron", "einops", "psutil", "packaging", "tqdm"),
    *("sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock", "setuptools", "typing_extensions"),
    *("yaml", "pkg_resources", "distutils", "slime"),
}
_SITE = sysconfig.get_paths()["purelib"]
_INSTALLED = {name.split(".")[0] for name in os.listdir(_SITE)}


class _BareFinder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        is_hidden = top in _INSTALLED and top not in _PRESENT and not top.startswith("_")
        if is_hidden and path is None:
            path = [entry for entry in sys.path if entry != _SITE]  # setuptools has copies of some packages
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = _BareFinder
