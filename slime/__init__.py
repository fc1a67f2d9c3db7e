"""slime: reinforcement learning post-training for large language models with Ray, Megatron and SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime import compat

if TYPE_CHECKING:
    from slime.api import RunRecord, load_run, train, train_async

__version__ = "0.1.0"
__all__ = ["RunRecord", "load_run", "train", "train_async"]

compat.install()


def __getattr__(name: str) -> Any:
    # On first use: every process of a run imports this package, and few of them need the interface.
    if name in __all__:
        from slime import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
