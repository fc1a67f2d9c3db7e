"""The platform class on top of SGLang's CPU mixin.

Every repair in :meth:`init_backend` documents its fault. All are needed with SGLang 0.5.23. Delete each one when SGLang
supports a CPU without ``sgl_kernel``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

_ATTENTION = "torch_native"


class SlimeCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain PyTorch: no triton, no graphs, no sgl_kernel."""

    # OOT, not CPU: the CPU member routes layers to sgl_kernel's operators, OOT to their native PyTorch versions
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Called by SGLang while it resolves its arguments."""
        # At this point SGLang's CPU rules have already chosen an Intel-only backend.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = _ATTENTION
        from sglang.srt.arg_groups import choices

        # SGLang refuses deterministic inference with a backend that is not in these lists.
        for names in (
            choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        ):
            if _ATTENTION not in names:
                names.append(_ATTENTION)

    def get_default_attention_backend(self) -> str:
        return _ATTENTION

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def empty_cache(self) -> None:
        """Do nothing: no memory is cached."""
        # The mixin would collect garbage: 40 ms in every weight sync, without a freed tensor.

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        return torch.profiler.ProfilerActivity.CPU

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Asked by SGLang for algorithms other than ``NGRAM``, too."""
        return algorithm == "NGRAM"

    def get_speculative_worker_cls(self, algorithm: str) -> type:
        """The worker that decodes with drafts. Called by SGLang before it allocates memory."""
        from slime.backends.sglang_utils.cpu_platform.drafts import HistoryWorker, replace_kernels

        replace_kernels()
        return HistoryWorker

    def init_backend(self) -> None:
        """Called once per process, at the import of SGLang's model runner."""
        # With more, OpenMP's spinning barriers collapse as soon as anything else runs: 69 instead of 3900 tokens/s.
        torch.set_num_threads(1)
        _full_precision()
        _default_device_module()
        _weight_comparison()
        _host_buffers()
        _deterministic_sampling()
        _batched_attention()
        _experts_elsewhere()
        _gated_shared_experts()


def _full_precision() -> None:
    """Keep fp32 products in fp32."""
    # SGLang requests TF32 for some models, such as GLM-4 MoE and MiniMax-M2. The request is meant for CUDA, but on a
    # CPU with AMX oneDNN lowers the precision as well, so results would depend on the CPU.
    torch.set_float32_matmul_precision("highest")
    torch.set_float32_matmul_precision = lambda precision: None


@functools.cache
def _default_device_module() -> None:
    """Make ``torch.get_device_module()`` return ``torch.cpu``."""
    # On a CUDA build it returns torch.cuda, and the release of memory would synchronize a missing GPU.
    original = torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        return torch.cpu if device is None else original(device)

    patched: Any = functools.update_wrapper(get_device_module, original)
    torch.get_device_module = patched


def _weight_comparison() -> None:
    """Compare in ``/weights_checker`` without a GPU."""
    from sglang.srt.utils import weight_checker_comparator as comparator

    def iter_chunks(self: Any) -> Any:
        flat = self.tensor.reshape(-1)
        for start in range(0, flat.numel(), comparator.CHUNK_NUMEL):
            yield flat[start : start + comparator.CHUNK_NUMEL], None

    comparator.RawComparable.iter_chunks = iter_chunks


def _host_buffers() -> None:
    """Allocate host buffers without registering them with CUDA."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **_: torch.empty(dims, dtype=dtype)


def _deterministic_sampling() -> None:
    """Replace the triton kernels of ``--enable-deterministic-inference``."""
    from sglang.kernels.ops.sampling import murmur_hash
    from sglang.srt import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None  # not needed with one thread
    murmur_hash.murmur_hash32 = murmur_hash32
    # modules that are already imported have bound the original name
    sampler: Any = sys.modules.get("sglang.srt.layers.sampler")
    if sampler is not None:
        sampler.murmur_hash32 = murmur_hash32


def _batched_attention() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    def create(runner: Any) -> Any:
        from slime.backends.sglang_utils.cpu_platform.attention import BatchedTorchAttnBackend

        return BatchedTorchAttnBackend(runner)

    ATTENTION_BACKENDS[_ATTENTION] = create


@functools.cache
def _experts_elsewhere() -> None:
    """Skip experts of other ranks in the native mixture."""
    # Expert parallelism marks them with -1, which the original function uses as an index.
    from sglang.srt.layers.moe import fused_moe_native

    native = fused_moe_native.moe_forward_native

    def moe_forward_native(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        weights, experts = topk_output[0], topk_output[1]
        if not bool((experts < 0).any()):
            result: torch.Tensor = native(layer, x, topk_output, config)
            return result
        if config.activation != "silu":
            raise NotImplementedError(f"expert parallelism with activation {config.activation} on a CPU")
        out = torch.zeros_like(x)
        for expert in range(layer.w13_weight.shape[0]):
            token, slot = (experts == expert).nonzero(as_tuple=True)
            if token.numel():
                gate, up = torch.nn.functional.linear(x[token], layer.w13_weight[expert]).chunk(2, -1)
                hidden = torch.nn.functional.silu(gate) * up
                part = torch.nn.functional.linear(hidden, layer.w2_weight[expert])
                out.index_add_(0, token, part * weights[token, slot, None].to(part.dtype))
        return out

    fused_moe_native.moe_forward_native = functools.update_wrapper(moe_forward_native, native)


def _gated_shared_experts() -> None:
    """Replace the triton kernel of a shared expert's gate (Qwen2-MoE)."""
    from sglang.kernels.ops.elementwise import elementwise

    elementwise.fused_gate_sigmoid_mul_add = gate_and_add
    model: Any = sys.modules.get("sglang.srt.models.qwen2_moe")
    if model is not None:
        model.fused_gate_sigmoid_mul_add = gate_and_add


def gate_and_add(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor) -> None:
    """``out += sigmoid(hidden . gate) * shared``, in place. All ``[t, h]`` except ``gate`` ``[h]``."""
    out += torch.sigmoid(hidden @ gate).unsqueeze(-1) * shared


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit) of (seed low, seed high, position, column): int64 [B, columns]."""
    # numpy has unsigned arithmetic that wraps. torch's int64 with masks takes 12 times as long.
    low, high = seed.to(torch.int64).numpy(), seed.to(torch.int64).numpy() >> 32
    state = np.zeros((len(low), 1), np.uint32)
    for word in (low, high, positions.numpy()):
        state = _absorb(state, word[:, None])
    state = _absorb(state, col_indices.numpy()[None])
    state ^= 16  # length of the input in bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state ^= state >> shift
        state *= np.uint32(factor)
    state ^= state >> 16
    return torch.from_numpy(state.astype(np.int64))


def _absorb(state: Any, word: Any) -> Any:
    key = word.astype(np.uint32)  # the low half
    key *= np.uint32(0xCC9E2D51)
    key = (key << 15) | (key >> 17)
    key *= np.uint32(0x1B873593)
    state = state ^ key
    state = (state << 13) | (state >> 19)
    state *= np.uint32(5)
    state += np.uint32(0xE6546B64)
    return state
