"""The gated delta-net layer of Qwen3-Next and Qwen3.5, in the place of attention (arXiv 2412.06464).

    hidden -> in_proj -> [q | k | v] -> causal convolution -> SiLU -> delta rule -> RMSNorm x SiLU(z) -> out_proj
                      -> z, b (writing strength), a (decay) -----------^             ^

Built by ``layer_specs``. Rows of every weight are sorted by key head, so that tensor parallelism cuts each of them into
equal pieces along dim 0: per key head, with r value heads, in_proj is [q dk | k dk | v r*dv | z r*dv | b r | a r], the
convolution [q | k | v]. ``families`` says which Hugging Face tensors they are made of.

Under context parallelism the ranks exchange tokens for key heads around the delta rule: each computes whole sequences
of its share of the heads (arXiv 2309.14509), so the recurrence itself knows nothing of it.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_to_all,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from slime.backends.megatron_utils.model.attention import PackedSegments
from slime.backends.megatron_utils.model.gated_delta_rule import DeltaRule, causal_conv, gated_delta_rule, unit_length
from slime.backends.training.context_parallel import zigzag_rows
from slime.utils import accelerator
from slime.utils.errors import ConfigError

__all__ = ["GatedDeltaNet", "select_delta_rule"]

logger = logging.getLogger(__name__)

_KERNELS = {
    "fla": ("fla.ops.gated_delta_rule", "flash-linear-attention"),
    "flashqla": ("flash_qla", "FlashQLA"),
}
"""--qwen-gdn-backend: the module that has ``chunk_gated_delta_rule``, and the package that it comes with."""


class GatedDeltaNet(MegatronModule):
    """Called by Megatron's ``TransformerLayer`` as its self-attention, with packed sequences only.

    Sizes are ``linear_*`` of the config. ``config.delta_rule_backend`` is what :func:`select_delta_rule` takes.
    """

    def __init__(self, config: Any, layer_number: int, pg_collection: Any, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        num_ranks = self.tp_group.size()
        self._key_dim, self._value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self._key_heads = config.linear_num_key_heads // num_ranks
        self._ratio = config.linear_num_value_heads // config.linear_num_key_heads
        self._mixed = 2 * self._key_dim + self._ratio * self._value_dim
        width = self._mixed + self._ratio * (self._value_dim + 2)
        linear = {
            "config": config,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            width * config.linear_num_key_heads,
            init_method=config.init_method,
            gather_output=False,
            **linear,
        )
        self.out_proj = RowParallelLinear(
            config.linear_num_value_heads * self._value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **linear,
        )
        channels = self._key_heads * self._mixed
        like = {
            "dtype": config.params_dtype,
            "device": None if config.use_cpu_initialization else accelerator.current().device(),
        }
        self.conv1d = torch.nn.Conv1d(
            channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False, **like
        )
        wide = like | {"dtype": torch.float32}
        self.A_log = torch.nn.Parameter(torch.empty(self._key_heads * self._ratio, **wide))
        self.dt_bias = torch.nn.Parameter(torch.empty(self._key_heads * self._ratio, **wide))
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.out_norm = torch.nn.RMSNorm(self._value_dim, eps=config.layernorm_epsilon, **like)
        self._rule = select_delta_rule(config.delta_rule_backend)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GatedDeltaNet:
        """What ``.to()``, ``.bfloat16()`` and their like do. The decay stays in fp32 in a 16-bit model, as engines keep
        it: it is multiplied over all tokens of a sequence, so that the rounding of a rate is felt at the end."""
        kept = [(parameter, parameter.data) for parameter in (self.A_log, self.dt_bias)]
        super()._apply(fn, recurse)
        for parameter, value in kept:
            parameter.data = value.to(parameter.device)
        return self

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: PackedSegments, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """``[t, 1, h]``, this rank's rows, -> the same, and no bias."""
        projected, _bias = self.in_proj(hidden_states)
        heads = projected.view(-1, self._key_heads, projected.size(-1) // self._key_heads)
        values = self._ratio * self._value_dim
        mixed, z, gates = heads.split([self._mixed, values, 2 * self._ratio], dim=-1)
        out = self._mix(torch.cat([mixed, gates], dim=-1), packed_seq_params)
        out = self._gated_norm(out.unflatten(-1, (self._ratio, -1)), z.unflatten(-1, (self._ratio, -1)))
        result, bias = self.out_proj(out.reshape(-1, 1, self._key_heads * values))
        return result, bias

    def _mix(self, heads: torch.Tensor, segments: PackedSegments) -> torch.Tensor:
        """``[t, key heads, q | k | v | b | a]`` -> ``[t, key heads, r * dv]``, for this rank's tokens."""
        if segments.cp_size == 1:
            return self._mix_sequences(heads, segments.cu_seqlens_q, slice(None))
        share = heads.size(1) // segments.cp_size
        mine = slice(segments.cp_rank * share, (segments.cp_rank + 1) * share)
        out = self._mix_sequences(_heads_for_tokens(heads, segments), segments.cu_seqlens_q, mine)
        return _tokens_for_heads(out, segments)

    def _mix_sequences(self, heads: torch.Tensor, cu_seqlens: Any, mine: slice) -> torch.Tensor:
        """The same for whole sequences of the key heads ``mine``."""
        mixed, b, a = heads.split([self._mixed, self._ratio, self._ratio], dim=-1)
        weight = self.conv1d.weight.unflatten(0, (self._key_heads, -1))[mine].flatten(0, 1)
        mixed = F.silu(causal_conv(mixed.flatten(1), weight, cu_seqlens)).view_as(mixed)
        query, key, value = mixed.split([self._key_dim, self._key_dim, self._ratio * self._value_dim], dim=-1)
        decay_rate, bias = (x.view(self._key_heads, -1)[mine] for x in (self.A_log, self.dt_bias))
        log_decay = -decay_rate.exp() * F.softplus(a.float() + bias)
        # value head i of a key head stands behind i - 1 others with the same query and key
        out = self._rule(
            unit_length(query).repeat_interleave(self._ratio, dim=1),
            unit_length(key).repeat_interleave(self._ratio, dim=1),
            value.reshape(value.size(0), -1, self._value_dim),
            log_decay.flatten(1),
            b.sigmoid().flatten(1),
            cu_seqlens,
        )
        return out.reshape(out.size(0), heads.size(1), -1)

    def _gated_norm(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """RMSNorm over every head, then times SiLU(z); the roundings are those of the reference model."""
        # all ranks hold the weight and see a share of the heads: its gradient is the sum of theirs
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight)
        normed = weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.out_norm.eps).to(x.dtype)
        return (normed * F.silu(z.float())).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """How tensor-parallel ranks share the weights, for Megatron's checkpoints."""
        assert metadata is not None, "the checkpoint writer passes it"
        own = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight}
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj", "out_proj", "out_norm"):
            module = getattr(self, name)
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state


def select_delta_rule(backend: str) -> DeltaRule:
    """The kernels of ``--qwen-gdn-backend``. On a CPU, and where fla (the default) is not installed: plain torch.

    Raises:
        ConfigError: the package that was asked for is not installed.
    """
    if accelerator.current().is_cpu:
        return gated_delta_rule
    module, package = _KERNELS[backend]
    try:
        kernel = importlib.import_module(module).chunk_gated_delta_rule
    except ImportError as error:
        if backend == "fla":
            _warn_of_plain_torch()
            return gated_delta_rule
        raise ConfigError(
            f"--qwen-gdn-backend {backend} needs the package {package} where the trainer runs ({error}): install it, "
            "or leave the flag out."
        ) from None
    return functools.partial(_run_kernel, kernel)


@functools.cache
def _warn_of_plain_torch() -> None:
    logger.warning(
        "gated delta-net layers run in plain torch, which is slow and takes memory: flash-linear-attention is not "
        "installed"
    )


def _run_kernel(kernel: Any, query: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Both libraries take ``[1, t, heads, d]`` in the dtype of the values, and int64 ``cu_seqlens``."""
    key, value, log_decay, beta, cu_seqlens = inputs
    out, _state = kernel(
        q=query[None].to(value.dtype),
        k=key[None].to(value.dtype),
        v=value[None],
        g=log_decay[None],
        beta=beta[None],
        scale=query.size(-1) ** -0.5,
        output_final_state=False,
        cu_seqlens=cu_seqlens.long(),
    )
    result: torch.Tensor = out[0]
    return result


# ------------------------------------------------------------------------------------------------ context parallelism


def _order(segments: PackedSegments) -> torch.Tensor:
    """int64 ``[T]``: which token of the whole micro-batch stands where when the ranks' tokens follow one another."""
    ranks = range(segments.cp_size)
    return torch.cat([zigzag_rows(segments.cu_seqlens_q, rank, segments.cp_size) for rank in ranks])


def _heads_for_tokens(x: torch.Tensor, segments: PackedSegments) -> torch.Tensor:
    """``[t, heads, d]`` of this rank's tokens -> ``[T, heads / ranks, d]`` of this rank's heads. Differentiable."""
    by_rank = x.unflatten(1, (segments.cp_size, -1)).transpose(0, 1).contiguous()
    received = all_to_all(segments.cp_group, by_rank).flatten(0, 1)
    return received.index_select(0, _order(segments).argsort())


def _tokens_for_heads(x: torch.Tensor, segments: PackedSegments) -> torch.Tensor:
    """The way back."""
    by_rank = x.index_select(0, _order(segments)).unflatten(0, (segments.cp_size, -1)).contiguous()
    return all_to_all(segments.cp_group, by_rank).transpose(0, 1).flatten(1, 2)
