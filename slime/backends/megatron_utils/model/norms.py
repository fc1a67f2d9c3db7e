"""Norms for Megatron's layer spec: torch's modules in the model's dtype.

Megatron's fallback without Apex and TransformerEngine refuses sequence parallelism and always keeps fp32 weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slime.utils import accelerator

_KINDS = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}


class TorchNorm:
    """Factory of a torch module, with the signature that Megatron's specs call."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:  # type: ignore
        device = None if config.use_cpu_initialization else accelerator.current().device()
        kind = ZeroCenteredNorm if config.layernorm_zero_centered_gamma else _KINDS[config.normalization]
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in norm.parameters():
            # Megatron then sums its gradient over the tensor ranks.
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class ZeroCenteredNorm(torch.nn.RMSNorm):
    """RMSNorm that multiplies with 1 + weight, in fp32 (Qwen3-Next)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., d]`` -> the same, in the dtype of ``x``."""
        normed = torch.nn.functional.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


class JointHeadNorm(torch.nn.Module):
    """MiniMax-M2's norm of queries or keys: the mean of squares is over all heads together, on whatever ranks they are.

    Built by Megatron's ``SelfAttention`` in place of a norm per head. ``weight`` ``[heads of this rank * head_dim]``.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float, *, num_heads: int) -> None:
        """``hidden_size`` is the width of a head, ``num_heads`` counts those of all ranks."""
        super().__init__()
        device = None if config.use_cpu_initialization else accelerator.current().device()
        self._width = num_heads * hidden_size
        self._eps = eps
        width_here = self._width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(width_here, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """``[t, 1, heads of this rank, head_dim]`` -> the same."""
        rows: torch.Tensor = _JointNorm.apply(  # type: ignore[no-untyped-call]
            heads.flatten(2), self.weight, self._eps, self._width, mpu.get_tensor_model_parallel_group()
        )
        return rows.view(heads.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's checkpoints, which take a module without this method for a copy on every tensor rank."""
        own = self.state_dict(prefix="", keep_vars=True)
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, {"weight": 0}, sharded_offsets)
        return state


class _JointNorm(torch.autograd.Function):
    """y = w x r with r = (sum of squares / width + eps)^(-1/2). The sum is over the ranks of ``group``.

    With g = w dy and u = x r: dx = r (g - u (sum of g u) / width), summed over all ranks, and dw = sum of dy u over the
    rows. Computes in fp32 and stores x and r only.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, width: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        squares = x.float().square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=group)
        factor = torch.rsqrt(squares / width + eps)
        ctx.save_for_backward(x, weight, factor)
        ctx.width, ctx.group = width, group
        return (x.float() * factor * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        x, weight, factor = ctx.saved_tensors
        unit, wide = x.float() * factor, grad.float()
        weighted = wide * weight.float()
        along = (weighted * unit).sum(-1, keepdim=True)
        dist.all_reduce(along, group=ctx.group)
        grad_x = factor * (weighted - unit * along / ctx.width)
        grad_weight = (wide * unit).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None, None
