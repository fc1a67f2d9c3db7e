"""SwiGLU (arXiv 2002.05202) without a copy in the backward pass, for devices without a fused kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``: ``[.., 2 w]``, gate before up -> ``[.., w]``."""
    out: torch.Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    """Bit for bit the gradient of the operators, which would join two halves that are computed apart."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        opened = F.silu(gate)
        ctx.save_for_backward(gate_up, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gate_up, opened = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        both = torch.empty_like(gate_up)
        to_gate, to_up = both.chunk(2, dim=-1)
        torch.mul(gradients[0], opened, out=to_up)
        torch.mul(gradients[0], up, out=to_gate)
        torch.ops.aten.silu_backward.grad_input(to_gate, gate, grad_input=to_gate)
        return both
