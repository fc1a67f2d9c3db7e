"""Defects of megatron-core 0.16.1 around experts and latent attention without TransformerEngine, and on gloo.

Applied by :func:`slime.backends.megatron_utils.patches.install.install`, never at import. Every function says what goes
wrong, why, and when to delete it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

__all__ = ["repair_expert_dispatch_on_cpu", "repair_missing_transformer_engine"]


def repair_missing_transformer_engine() -> None:
    """Two modules use names of TransformerEngine that do not exist without it.

    Why: ``moe_utils`` reads ``te_general_gemm``, which only a successful import defines (NameError in every router);
    ``multi_latent_attention`` believes in TransformerEngine although its classes are mocks then (TypeError in
    ``isinstance``).
    Upstream: core_v0.16.1. Delete when a MoE layer and a latent-attention layer build and run without TE.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False


def repair_expert_dispatch_on_cpu() -> None:
    """Dispatching tokens to experts fails on host tensors.

    1. ``maybe_move_tensor_to_cpu`` returns a host tensor as it is even where a numpy array is asked for, and
       ``all_to_all_single`` then gets tensors as split sizes (TypeError).
    2. gloo cannot gather parts of unequal sizes, which experts cut by tensor parallelism need: they are padded.

    Upstream: core_v0.16.1. Delete the first when the function honours ``as_numpy`` for host tensors, the second when
    gloo has ``all_gather`` with unequal sizes.
    """
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    stock = mappings._gather_along_first_dim

    def gather(x: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return stock(x, group, output_split_sizes, use_global_buffer)
        lengths = [int(length) for length in output_split_sizes]
        longest = max([*lengths, 1])
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: x.size(0)] = x
        out = x.new_empty(longest * len(lengths), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(out, padded, group=group)
        return torch.cat([out[i * longest : i * longest + length] for i, length in enumerate(lengths)])

    mappings._gather_along_first_dim = gather
