"""The layers of a model as specs, which are Megatron's descriptions of the classes to build.

The classes are Megatron's local (not TransformerEngine) ones with slime's core attention and the norms below. The
switches of the model family decide, or a user's spec. For --transformer-impl transformer_engine and --fp8-format,
:func:`with_te_layers` exchanges classes in the finished spec:

    norm, then column-parallel linear    TELayerNormColumnParallelLinear, if nothing else reads the norm's output
    other linear layers and norms        TEColumnParallelLinear, TERowParallelLinear, TENorm
    attention                            TEDotProductAttention, a ring with context parallelism
    experts                              TEGroupedMLP

Down-projections of latent attention, the core of sparse attention, delta nets, joint and output norms, vision towers,
embedding and head stay. Two kinds of parameters get other names, which ``models.family.local_name`` maps back. Tables,
checkpoints and flags have the local names only. ``megatron.core.extensions.transformer_engine`` is imported inside of
functions: without the package its classes are mocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec_for_backend
from megatron.core.post_training.modelopt.layers import Linear as ReplicatedLinear
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import _get_block_submodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slime.backends.megatron_utils.model.attention import LatentSelfAttention, PackedAttention
from slime.backends.megatron_utils.model.experts import GroupedExperts, group_experts
from slime.backends.megatron_utils.model.gated_delta_net import GatedDeltaNet
from slime.backends.megatron_utils.model.sparse_attention import make_sparse
from slime.hooks import load_function
from slime.models.family import Family
from slime.models.shape import SparseShape
from slime.utils import accelerator
from slime.utils.errors import ConfigError, translated

_NORMS = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm")
_STOCK_NORMS = (WrappedTorchNorm, FusedLayerNorm)


def block_spec(config: Any, family: Family, vp_stage: int | None = None, *, sparse: SparseShape | None = None) -> Any:
    """The decoder layers of this pipeline stage, or of its ``vp_stage``-th chunk.

    Raises:
        ConfigError: with ``sparse`` attention, the first of the layers has no indexer.
    """
    block = _attention_block(config, family, vp_stage)
    if sparse is not None:
        make_sparse(block, sparse, first_layer=get_transformer_layer_offset(config, vp_stage=vp_stage))
    if config.linear_attention_freq is not None:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        block.layer_specs = [
            _delta_net(layer) if config.linear_attention_freq[number] else layer
            for number, layer in enumerate(block.layer_specs, first)
        ]
    return block


def _attention_block(config: Any, family: Family, vp_stage: int | None) -> Any:
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        _adapt(layer, config, family)
    block.layer_norm = TorchNorm
    return block


def _delta_net(layer: Any) -> ModuleSpec:
    # A copy, because Megatron's list has the same object for every layer of a kind.
    submodules = dataclasses.replace(layer.submodules, self_attention=ModuleSpec(module=GatedDeltaNet))
    return ModuleSpec(module=layer.module, params=layer.params, submodules=submodules)


def user_block(layers: Any, config: Any, vp_stage: int | None = None) -> Any:
    """A copy of the decoder layers of a user's ``--spec`` that reads packed sequences.

    Megatron's attention kernel and norms become those of :func:`block_spec`, which have the same weights. The user's
    classes are not changed.

    Args:
        layers: Megatron's description of a layer, or of the block of this pipeline stage.

    Raises:
        ConfigError: it is neither, or uses classes of TransformerEngine.
    """
    wrong = ConfigError(
        f"--spec: the function returned a {type(layers).__name__}; it must return a ModuleSpec of a layer, a "
        "TransformerBlockSubmodules, or a function with a parameter pre_process that builds the model."
    )
    with translated(lambda _: wrong):  # Megatron raises a plain Exception
        block = _get_block_submodules(config, layers, vp_stage)
    kernels = {DotProductAttention: PackedAttention, MLASelfAttention: LatentSelfAttention}
    block = with_classes(block, {**kernels, **dict.fromkeys(_STOCK_NORMS, TorchNorm)})
    for layer in block.layer_specs:
        group_experts(layer)
        attention = layer.submodules.self_attention
        if isinstance(attention, ModuleSpec) and isinstance(attention.submodules, MLASelfAttentionSubmodules):
            _replicate_down_projections(attention.submodules)
    return block


def mtp_spec(config: Any, family: Family, vp_stage: int | None = None, *, block: Any | None = None) -> Any | None:
    """The multi-token-prediction layers. None if the stage has none.

    Each contains a layer like the decoder's last, with full attention.

    Args:
        block: the layers of a user's ``--spec``, if there are any.
    """
    if not config.mtp_num_layers:
        return None
    block = _attention_block(config, family, vp_stage) if block is None else block
    spec = get_gpt_mtp_block_spec_for_backend(config, block, backend=LocalSpecProvider(), vp_stage=vp_stage)
    for layer in spec.layer_specs if spec is not None else ():
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(layer.submodules, name, TorchNorm)
    return spec


def _adapt(layer: Any, config: Any, family: Family) -> None:
    group_experts(layer)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    for owner in (layer.submodules, attention):
        for name in _NORMS:
            if vars(owner).get(name) not in (None, IdentityOp):  # IdentityOp: the model lacks this norm
                setattr(owner, name, TorchNorm)
    if config.multi_latent_attention:
        layer.submodules.self_attention.module = LatentSelfAttention
        _replicate_down_projections(attention)
    for name in family.special_layers:
        change = load_function(name) if ":" in name else SPECIAL_LAYERS[name]
        change(layer, config)


def _join_qk_norm(layer: Any, config: Any) -> None:
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = ModuleSpec(JointHeadNorm, params={"num_heads": config.num_attention_heads})
    attention.k_layernorm = ModuleSpec(JointHeadNorm, params={"num_heads": config.num_query_groups})


def _add_post_norms(layer: Any, config: Any) -> None:
    layer.module = PostNormLayer


SPECIAL_LAYERS: dict[str, Callable[[Any, Any], None]] = {
    "joint_qk_norm": _join_qk_norm,
    "post_norms": _add_post_norms,
}
"""Values of ``Family.special_layers``: functions that change the spec of a decoder layer."""


def _replicate_down_projections(attention: Any) -> None:
    # The rope part of the key leaves the down-projection without another collective. If tensor-parallel ranks shared
    # the projection, its gradient would miss the share of the other ranks.
    if attention.linear_q_down_proj is ColumnParallelLinear:
        attention.linear_q_down_proj = ReplicatedLinear
    if attention.linear_kv_down_proj is ColumnParallelLinear:
        attention.linear_kv_down_proj = ReplicatedLinear


class PostNormLayer(TransformerLayer):
    """GLM-4: norms of the outputs of attention and MLP, before the residual stream."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = _normed(self.post_self_attn_layernorm, self.self_attn_bda)  # type: ignore[has-type]
        self.mlp_bda = _normed(self.post_mlp_layernorm, self.mlp_bda)  # type: ignore[has-type]


def _normed(norm: torch.nn.Module, add: Callable[..., Any]) -> Callable[..., Any]:
    """``add``, which is Megatron's "add bias, drop out, add to the residual stream", applied after ``norm``."""

    def build(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        inner = add(training, fused)

        def run(output_with_bias: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            output, bias = output_with_bias
            added: torch.Tensor = inner((norm(output if bias is None else output + bias), None), residual, dropout)
            return added

        return run

    return build


# ---- classes of Transformer Engine


def with_te_layers(spec: Any, config: Any) -> Any:
    """A copy of Megatron's layer ``spec``, or None, with Transformer Engine's classes."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TENorm,
        TERowParallelLinear,
    )

    classes: dict[type, Any] = {
        ColumnParallelLinear: TEColumnParallelLinear,
        RowParallelLinear: TERowParallelLinear,
        TorchNorm: TENorm,
    }
    if config.has_te_attention:
        classes[PackedAttention] = TEDotProductAttention
    copy = with_classes(spec, classes)
    for layer in _layers_in(copy):
        _join_norms(layer)
        _group_experts(layer)
    return copy


def _layers_in(spec: Any) -> Iterator[TransformerLayerSubmodules]:
    if isinstance(spec, TransformerLayerSubmodules):
        yield spec
    elif isinstance(spec, list):
        for one in spec:
            yield from _layers_in(one)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        yield from _layers_in(list(vars(spec).values()))


def _parts(module: Any) -> Any:
    return module.submodules if isinstance(module, ModuleSpec) else None


def _join_norms(layer: TransformerLayerSubmodules) -> None:
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
    )

    saved, pair = layer.sharded_state_dict_keys_map, (TENorm, TEColumnParallelLinear)
    attention, mlp = _parts(layer.self_attention), _parts(layer.mlp)
    # The keys of a norm in checkpoints do not change. Megatron may save a local norm under the joined name already.
    if isinstance(attention, SelfAttentionSubmodules) and (layer.input_layernorm, attention.linear_qkv) == pair:
        layer.input_layernorm, attention.linear_qkv = IdentityOp, TELayerNormColumnParallelLinear
        if "input_layernorm." not in saved:
            saved = saved | {"self_attention.linear_qkv.layer_norm_": "input_layernorm."}
    if isinstance(mlp, MLPSubmodules) and (layer.pre_mlp_layernorm, mlp.linear_fc1) == pair:
        layer.pre_mlp_layernorm, mlp.linear_fc1 = IdentityOp, TELayerNormColumnParallelLinear
        if "pre_mlp_layernorm." not in saved:
            saved = saved | {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
    layer.sharded_state_dict_keys_map = saved


def _group_experts(layer: TransformerLayerSubmodules) -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear

    parts = _parts(layer.mlp)
    if isinstance(parts, MoESubmodules) and parts.experts == ModuleSpec(module=GroupedExperts):
        linears = MLPSubmodules(linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear)
        parts.experts = ModuleSpec(module=TEGroupedMLP, submodules=linears)


def prepare_te_layers(model: Any) -> None:
    """Finish a new model: three things that Megatron's wrappers leave open."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention, TERowParallelGroupedLinear

    for module in model.modules():
        if isinstance(module, TEDotProductAttention):
            # Without the answer, every layer compares two tensors of lengths on the device and waits for the result.
            module.kept_packed_seq_params.add("pad_between_seqs")
        if isinstance(module, TERowParallelGroupedLinear):
            for parameter in module.parameters():
                parameter.partition_dim = 1  # marked as 0 if tensor parallelism divides experts
        if hasattr(module, "fuse_wgrad_accumulation"):
            # The product that makes a weight's gradient adds it to the fp32 sum. Megatron's flag for that also holds
            # for its local layers, such as the LM head, whose kernel is Apex's.
            module.fuse_wgrad_accumulation = True


def with_classes(spec: Any, classes: dict[type, Any]) -> Any:
    """A copy of ``spec``, Megatron's description of layers, with other classes."""
    if isinstance(spec, type):
        if spec.__module__.startswith(("megatron.core.extensions.transformer_engine", "transformer_engine.")):
            raise ConfigError(
                f"--spec: {spec.__name__} is a class of TransformerEngine. Build the layers with "
                "use_transformer_engine=False: --transformer-impl transformer_engine exchanges their classes."
            )
        return classes.get(spec, spec)
    if isinstance(spec, list):
        return [with_classes(one, classes) for one in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return dataclasses.replace(spec, **{name: with_classes(part, classes) for name, part in vars(spec).items()})
    return spec


_KINDS = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}


class TorchNorm:
    """Factory of a torch module in the model's dtype, with the signature that Megatron's specs call.

    Megatron's fallback without Apex and TransformerEngine refuses sequence parallelism and always keeps fp32 weights.
    """

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
