"""SGLang's ``torch_native`` LoRA backend on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import torch


class _HostTorch:
    """``torch`` for a module that asks for pinned memory, which needs a GPU: its tensors are in ordinary memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def use_ordinary_memory() -> None:
    """Keep offsets and ranks of adapters in ordinary memory. Idempotent. SGLang 0.5.23 always pins them."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    host: Any = _HostTorch()
    layers.torch = torch_backend.torch = host
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
