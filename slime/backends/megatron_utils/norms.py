"""Norms for Megatron's layer spec: torch's own, in the model's dtype, with the mark that sequence parallelism needs.

Megatron's fallback without Apex and TransformerEngine refuses sequence parallelism and always keeps fp32 weights.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.utils import accelerator

__all__ = ["TorchNorm"]

_KINDS = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}


class TorchNorm:
    """Factory with the signature that Megatron's specs call; returns a torch module."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:  # type: ignore
        device = None if config.use_cpu_initialization else accelerator.current().device()
        norm = _KINDS[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
