"""Norms that work with sequence parallelism and any parameter dtype, without TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch

from slime.utils import accelerator

__all__ = ["make_norm"]


def make_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """The norm of ``config.normalization``; megatron-core calls this as a module's builder.

    megatron-core's own torch wrapper refuses sequence parallelism and always makes float32 parameters.
    """
    kind = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
    device = None if config.use_cpu_initialization else accelerator.current().device()
    norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
