"""The gated delta-net layer of Qwen3-Next and Qwen3.5, in place of attention (arXiv 2412.06464).

    hidden -> in_proj -> [q | k | v] -> causal convolution -> SiLU -> delta rule -> RMSNorm x SiLU(z) -> out_proj
                      -> z, b (writing strength), a (decay) -----------^             ^

Rows of every weight are sorted by key head, so that tensor parallelism cuts each weight into equal pieces along dim 0.
Per key head, with r value heads: in_proj is [q dk | k dk | v r*dv | z r*dv | b r | a r], the convolution [q | k | v].

The delta rule (equation 10). A head keeps a state S of dk x dv numbers per sequence, zero at its start. With keys of
length one, decay a_t = exp(g_t), g_t <= 0, and writing strength b_t in (0, 1):

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        decay, then replace the value stored for k_t
    o_t = S_t^T q_t / sqrt(dk)

``gated_delta_rule`` computes it in plain torch: the reference, and the fallback without a kernel.

Under context parallelism the ranks exchange tokens for key heads around the delta rule: each rank computes whole
sequences of its share of the heads (arXiv 2309.14509).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from importlib import metadata
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
from packaging.version import Version

from slime.backends.megatron_utils.model.attention import PackedSegments, Sequences
from slime.utils import accelerator
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

# --qwen-gdn-backend: the module that has ``chunk_gated_delta_rule``, and the package that it comes with.
_KERNELS = {
    "fla": ("fla.ops.gated_delta_rule", "flash-linear-attention"),
    "flashqla": ("flash_qla", "FlashQLA"),
}


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
        width = self._mixed + self._ratio * (self._value_dim + 2)  # after q, k, v: z, b and a
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
        """Keep the decay in fp32 under ``.to()``, ``.bfloat16()`` and the like."""
        # As engines do. It is multiplied over all tokens of a sequence, so that its rounding error grows with them.
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
        assert segments.sequences is not None, "the model calls prepare"
        if segments.cp_size == 1:
            return self._mix_sequences(heads, segments.sequences, slice(None))
        share = heads.size(1) // segments.cp_size  # a rule checks that tensor x context ranks divide the key heads
        mine = slice(segments.cp_rank * share, (segments.cp_rank + 1) * share)
        out = self._mix_sequences(_heads_for_tokens(heads, segments), segments.sequences, mine)
        return _tokens_for_heads(out, segments)

    def _mix_sequences(self, heads: torch.Tensor, sequences: Sequences, mine: slice) -> torch.Tensor:
        """As :meth:`_mix`, for whole sequences of the key heads ``mine``."""
        mixed, b, a = heads.split([self._mixed, self._ratio, self._ratio], dim=-1)
        weight = self.conv1d.weight.unflatten(0, (self._key_heads, -1))[mine].flatten(0, 1)
        mixed = F.silu(causal_conv(mixed.flatten(1), weight, sequences)).view_as(mixed)
        query, key, value = mixed.split([self._key_dim, self._key_dim, self._ratio * self._value_dim], dim=-1)
        decay_rate, bias = (x.view(self._key_heads, -1)[mine] for x in (self.A_log, self.dt_bias))
        log_decay = -decay_rate.exp() * F.softplus(a.float() + bias)
        # the r value heads of a key head share its query and key
        out = self._rule(
            unit_length(query).repeat_interleave(self._ratio, dim=1),
            unit_length(key).repeat_interleave(self._ratio, dim=1),
            value.reshape(value.size(0), -1, self._value_dim),
            log_decay.flatten(1),
            b.sigmoid().flatten(1),
            sequences,
        )
        return out.reshape(out.size(0), heads.size(1), -1)

    def _gated_norm(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """RMSNorm over every head, then times SiLU(z), with the roundings of the reference model."""
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
        for name, module in {"in_proj": self.in_proj, "out_proj": self.out_proj, "out_norm": self.out_norm}.items():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state


def select_delta_rule(backend: str) -> DeltaRule:
    """The kernels of ``--qwen-gdn-backend``. On a CPU, and where fla (the default) is not installed: plain torch.

    Raises:
        ConfigError: the package that was asked for is not installed, or Triton computes wrong gradients of its kernels.
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
    if backend == "fla" and _has_wrong_gradients():
        raise ConfigError(
            f"--qwen-gdn-backend fla: triton {metadata.version('triton')} computes wrong gradients of gated delta nets "
            "on Hopper GPUs (flash-linear-attention's issue 640): pip install 'triton>=3.7.1' or tilelang. Without "
            "flash-linear-attention the layers run in plain torch, which is slow."
        )
    return functools.partial(_run_kernel, kernel)


def _has_wrong_gradients() -> bool:
    """Whether fla's kernels refuse their backward pass here, which would end the first training step."""
    if not Version("3.4.0") <= Version(metadata.version("triton")) < Version("3.7.1"):
        return False
    return torch.cuda.get_device_capability()[0] == 9 and importlib.util.find_spec("tilelang") is None


@functools.cache
def _warn_of_plain_torch() -> None:
    logger.warning(
        "gated delta-net layers run in plain torch, which is slow and takes memory: flash-linear-attention is not "
        "installed"
    )


def _run_kernel(
    kernel: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Both libraries take ``[1, t, heads, d]`` in the dtype of the values, and int64 ``cu_seqlens``."""
    out, _state = kernel(
        q=query[None].to(value.dtype),
        k=key[None].to(value.dtype),
        v=value[None],
        g=log_decay[None],
        beta=beta[None],
        scale=query.size(-1) ** -0.5,
        output_final_state=False,
        cu_seqlens=sequences.cu_seqlens,
    )
    result: torch.Tensor = out[0]
    return result


def _heads_for_tokens(x: torch.Tensor, segments: PackedSegments) -> torch.Tensor:
    """``[t, heads, d]`` of this rank's tokens -> ``[T, heads / ranks, d]`` of this rank's heads. Differentiable."""
    by_rank = x.unflatten(1, (segments.cp_size, -1)).transpose(0, 1).contiguous()
    received = all_to_all(segments.cp_group, by_rank).flatten(0, 1)
    assert segments.sequences is not None, "the model calls prepare"
    return received.index_select(0, segments.sequences.by_token)


def _tokens_for_heads(x: torch.Tensor, segments: PackedSegments) -> torch.Tensor:
    assert segments.sequences is not None, "the model calls prepare"
    by_rank = x.index_select(0, segments.sequences.by_rank).unflatten(0, (segments.cp_size, -1)).contiguous()
    return all_to_all(segments.cp_group, by_rank).transpose(0, 1).flatten(1, 2)


DeltaRule = Callable[..., torch.Tensor]
"""``(query, key, value, log_decay, beta, sequences)`` as :func:`gated_delta_rule` takes them -> ``[t, heads, dv]``."""


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Rows of the last dimension scaled to length one, fp32. The epsilon is that of the model's reference kernels."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def causal_conv(x: torch.Tensor, weight: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Every channel convolved with its own ``K`` weights over the last K tokens of the same sequence.

    Args:
        x: ``[t, channels]``, concatenated sequences.
        weight: ``[channels, 1, K]``; ``weight[:, :, -1]`` multiplies the token itself.

    Returns:
        ``[t, channels]``.
    """
    # K - 1 zeros in front of every sequence keep its neighbors apart
    gap = weight.size(-1) - 1
    rows = torch.arange(x.size(0), device=x.device) + gap * (sequences.number + 1)
    spaced = x.new_zeros(x.size(0) + gap * sequences.count, x.size(1)).index_copy(0, rows, x)
    out = F.conv1d(spaced.t()[None], weight, groups=x.size(1))[0].t()
    return out.index_select(0, rows - gap)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """The outputs o_t of all tokens, computed a chunk of tokens at a time.

    Args:
        query, key: ``[t, heads, dk]``, rows of length one.
        value: ``[t, heads, dv]``.
        log_decay: ``[t, heads]`` g_t.
        beta: ``[t, heads]`` b_t.
        sequences: the state is zero at the start of each. The size of its chunks changes only the rounding.

    Returns:
        ``[t, heads, dv]`` in the dtype of ``value``. All arithmetic is fp32.
    """
    slots, counts, chunk_size = sequences.slots, sequences.chunks, sequences.chunk_size

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """``[t, heads, d]`` -> ``[chunks, heads, chunk_size, d]``; missing tokens are zero: no effect on the state."""
        padded = x.new_zeros(sum(counts) * chunk_size, *x.shape[1:], dtype=torch.float32).index_copy(
            0, slots, x.float()
        )
        return padded.view(-1, chunk_size, *x.shape[1:]).transpose(1, 2)

    queries, keys, values = chunks(query * query.size(-1) ** -0.5), chunks(key), chunks(value)
    strength = chunks(beta.unsqueeze(-1))
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=value.device).triu(1)
    # [chunks, heads, chunk_size, 1]: log of a_1 ... a_i. No cumsum: on a GPU it has no deterministic kernel
    decay = (~later).float() @ chunks(log_decay.unsqueeze(-1))

    # Inside a chunk (arXiv 2406.06484, section 3.2): token i writes b_i (v_i - the value stored for k_i), which
    # depends on the writes of the tokens j < i. With A_ij = b_i (k_i . k_j) a_{j+1} ... a_i below the diagonal:
    #     (I + A) writes = diag(b) V - diag(b) diag(a_1 ... a_i) K S      S: the state before the chunk
    # Masked before exp: above the diagonal the differences are positive, and infinity times zero is NaN.
    between = (decay - decay.mT).masked_fill(later, -torch.inf).exp()
    overlap = (strength * keys) @ keys.mT * between
    right = torch.cat([strength * values, strength * decay.exp() * keys], dim=-1)
    own, of_state = torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True).split(
        [value.size(-1), key.size(-1)], dim=-1
    )
    within = queries @ keys.mT * between
    queries = queries * decay.exp()
    end = decay[:, :, -1:]
    keys = keys * (end - decay).exp()

    state = value.new_zeros(counts[0] if counts else 0, *keys.shape[1:2], key.size(-1), value.size(-1)).float()
    outputs = []
    # The first chunks of all sequences, then the second ones ... Sequences are sorted by length: ended ones come last.
    for begin, count in zip(sequences.first_chunks, counts, strict=True):
        part = slice(begin, begin + count)
        state = state[:count]
        writes = own[part] - of_state[part] @ state
        outputs.append(queries[part] @ state + within[part] @ writes)
        state = end[part].exp() * state + keys[part].mT @ writes
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1) if outputs else value.float()
    return out.index_select(0, slots).to(value.dtype)
