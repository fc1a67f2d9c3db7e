"""Transformer Engine's modules in torch, for one rank, under Megatron's real wrappers. The package needs CUDA.

Constructors and forward methods have the parameters of Transformer Engine 2.11.0 that Megatron may pass, no others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from slime.backends.training.attention import packed_attention, plan_attention

WRAPPERS = "megatron.core.extensions.transformer_engine"


class _Module(torch.nn.Module):
    """FP8 scales are an extra state, empty without FP8."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass

    def _weight(self, rows: int, columns: int, dtype: torch.dtype, init_method: Any, dim: int) -> torch.nn.Parameter:
        weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype))
        init_method(weight)
        vars(weight).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
        return weight


class _Product(torch.autograd.Function):
    """``inp @ weight.mT``. Adds the weight's gradient to ``main_grad`` and returns nonsense, as the kernels do."""

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, weight: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        ctx.save_for_backward(inp)
        ctx.weight, ctx.overwrites = weight, is_first_microbatch is True
        return inp @ weight.mT

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (inp,), weight, nonsense = ctx.saved_tensors, ctx.weight, None
        if weight.requires_grad:
            main = weight.main_grad
            rows, inputs = (part.flatten(0, -2).to(main.dtype) for part in (gradients[0], inp))
            main.copy_(rows.mT @ inputs) if ctx.overwrites else main.addmm_(rows.mT, inputs)
            weight.grad_added_to_main_grad = True
            nonsense = torch.full_like(weight, float("nan"))
        return gradients[0] @ weight, nonsense, None


def _product(module: Any, inp: torch.Tensor, weight: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
    if module.fuse_wgrad_accumulation:
        return _Product.apply(inp, weight, is_first_microbatch)  # type: ignore[no-any-return, no-untyped-call]
    return inp @ weight.mT


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert not (bias and parallel_mode == "row")
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.parallel_mode, self._returns_bias = parallel_mode, return_bias
        self.weight = self._weight(out_features, in_features, params_dtype, init_method, int(parallel_mode == "row"))
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else None

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        out = _product(self, inp, self.weight, is_first_microbatch)
        if self._returns_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class RMSNorm(_Module):
    def __init__(
        self,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: Any = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size or 0, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self._eps, self._adds_one = eps, zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normed(x, self.weight, self._eps, self._adds_one)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool) -> torch.Tensor:
    if adds_one:
        return (F.rms_norm(x.float(), weight.shape, eps=eps) * (1.0 + weight.float())).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: Any = None,
        **others: Any,
    ) -> None:
        assert (normalization, return_layernorm_output) == ("RMSNorm", False)
        super().__init__(in_features, out_features, params_dtype=params_dtype, **others)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype))
        self._eps, self._adds_one = eps, zero_centered_gamma

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = _normed(inp, self.layer_norm_weight, self._eps, self._adds_one)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.fp8, self.fp8_calibration, self.fp8_meta = False, False, {"fp8_checkpoint": False}
        for number in range(num_gemms):
            dim = int(parallel_mode == "row")
            setattr(self, f"weight{number}", self._weight(out_features, in_features, params_dtype, init_method, dim))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> torch.Tensor:
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        pairs = zip(inp.split(m_splits), weights, strict=True)
        return torch.cat([_product(self, part, weight, is_first_microbatch) for part, weight in pairs])


class DotProductAttention(_Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.groups, self.cp_comm_type = num_gqa_groups, "p2p"
        self._scale = self.channels[0] ** -0.5 if softmax_scale is None else softmax_scale

    def set_context_parallel_group(self, group: Any, ranks: Any, stream: Any, cp_comm_type: str) -> None:
        assert len(ranks) == 1

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: bool | None = None,
    ) -> torch.Tensor:
        assert (qkv_format, attn_mask_type, pad_between_seqs) == ("thd", "padding_causal", False)
        assert query_layer.dtype == torch.bfloat16
        assert isinstance(max_seqlen_q, int)
        assert (key_layer.size(1), query_layer.size(2), value_layer.size(2)) == (self.groups, *self.channels)
        assert cu_seqlens_q is not None
        assert cu_seqlens_q.dtype == torch.int32
        out = packed_attention(query_layer, key_layer, value_layer, plan_attention(cu_seqlens_q), scale=self._scale)
        return out.flatten(1)


def _package() -> dict[str, ModuleType]:
    def module(name: str, **content: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(content)
        return made

    name = "transformer_engine"
    operations = SimpleNamespace(Sequential=torch.nn.Sequential, FusibleOperation=torch.nn.Module)
    distributed = module(f"{name}.pytorch.distributed", CudaRNGStatesTracker=type("CudaRNGStatesTracker", (), {}))
    classes = {kind.__name__: kind for kind in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)}
    pytorch = module(f"{name}.pytorch", ops=operations, distributed=distributed, **classes)
    fp8 = module(f"{name}.pytorch.fp8", FP8GlobalStateManager=None, fp8_autocast=None)
    router = module(
        f"{name}.pytorch.router",
        fused_compute_score_for_moe_aux_loss=None,
        fused_moe_aux_loss=None,
        fused_topk_with_score_function=None,
    )
    recipe = SimpleNamespace(DelayedScaling=type("DelayedScaling", (), {}))
    package = module(name, __version__="2.11.0", pytorch=pytorch, common=SimpleNamespace(recipe=recipe))
    for one in (package, pytorch):
        one.__path__ = []  # type: ignore[attr-defined]
    return {one.__name__: one for one in (package, pytorch, fp8, router, distributed)}


@contextmanager
def fake_transformer_engine() -> Iterator[ModuleType]:
    """Megatron's wrappers of Transformer Engine as they are where it is installed."""
    extensions, utils = import_module("megatron.core.extensions"), import_module("megatron.core.utils")
    stock, version = sys.modules.pop(WRAPPERS), utils._te_version
    fakes = _package()
    sys.modules.update(fakes)
    try:
        yield import_module(WRAPPERS)
    finally:
        for name in fakes:
            del sys.modules[name]
        sys.modules[WRAPPERS] = extensions.transformer_engine = stock
        utils._te_version = version
