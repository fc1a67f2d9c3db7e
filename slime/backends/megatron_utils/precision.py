"""Low precision of single layers: FP8 latents, INT4 experts, FP8 linear layers, and DeepGEMM. Called by ``setup``.

FP8 latents of sparse attention, so that the trainer attends to the values in an engine's FP8 cache:

    c' = s * e4m3(c / s),   s = max|c| / 448 per block of columns of a token

INT4 experts, so that the trainer computes with the rounded weights of an INT4 engine:

    forward     y = x q(w)^T         q(w) = clamp(round(w / s), -8, 7) * s,  s = max|w| / 7.5 per group of a row
    backward    dx = dy q(w),  dw = dy^T x

Gradients pass straight through the rounding (arXiv:1308.3432).

FP8 linear layers (--fp8-format) are those of ``layer_specs``, which read Megatron's FP8 context. Embedding, LM
head, attention and norms stay in bf16. The FP8 layers have not run on a GPU yet.

Products of the package deep_gemm, as the engines compute them (--megatron-deepgemm-forward-layers). The engines'
checkpoint decides between 8 and 16 bits:

    8 bits    tokens in groups of 128 columns, weights in blocks of 128 x 128, one scale each, rounded as in a weight
              sync (``slime.weight_sync.quantize``). Gradients are those of the bf16 product
    16 bits   bf16 throughout

    dense     linear layers of attention, MLPs and shared experts: each product is replaced
    experts   all experts of a layer at once: two grouped products and the activation between them

Weights, names, communication and checkpoints do not change. The functions ``enable_*`` install them as hooks, under
names that launch scripts use. The package needs a GPU of compute capability 9.0. It has not run on a GPU yet.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from megatron.core import parallel_state as mpu
from megatron.core.enums import Fp8Recipe
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from slime.backends.megatron_utils.checkpoint.tensors import ModelTensors, chunks_of
from slime.backends.megatron_utils.model.experts import ExpertLinear, GroupedExperts, experts_of, multiply
from slime.backends.training.arguments import PluginArgs
from slime.backends.training.hf_files import raise_everywhere
from slime.config.groups import from_args
from slime.models.config_json import load_model_config
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError
from slime.weight_sync.quantize import find_quantizer, int4_scale, quantize_fp8, round_int4


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, latents: torch.Tensor, block_size: int) -> torch.Tensor:
        rows = latents.reshape(-1, latents.shape[-1])
        values, scale = quantize_fp8(rows, (1, block_size))
        factors = scale.repeat_interleave(block_size, dim=1)[:, : rows.shape[1]]
        return (values.float() * factors).to(latents.dtype).view(latents.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def fake_fp8(latents: torch.Tensor, block_size: int) -> torch.Tensor:
    """``[..., C]`` rounded as in an FP8 cache. The last block may be smaller. Same shape and dtype."""
    rounded: torch.Tensor = _Rounding.apply(latents, block_size)  # type: ignore[no-untyped-call]
    return rounded


def fake_int4(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """``[M, N]`` rounded as by ``quantize_int4``. Same shape and dtype.

    Raises:
        ValueError: ``group_size`` does not divide N.
    """
    rows, columns = weight.shape
    if columns % group_size:
        raise ValueError(f"the group size {group_size} does not divide {columns} columns")
    groups = weight.detach().float().view(rows, columns // group_size, group_size)
    scale = int4_scale(groups).to(weight.dtype)[..., None]  # the dtype in which engines have the scales
    return (round_int4(groups, scale) * scale.float()).to(weight.dtype).view(rows, columns)


_ROUNDED_TOGETHER = 2**26
"""Weights. Rounding takes several times their memory in fp32."""


def _fake_int4_experts(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """:func:`fake_int4` of the experts of a layer, a few at a time."""
    rows = max(1, _ROUNDED_TOGETHER // weight.shape[1])
    return torch.cat([fake_int4(part, group_size) for part in weight.split(rows)])


def _multiply(group_size: int, *, input: torch.Tensor, weight: torch.Tensor, **others: Any) -> torch.Tensor:
    """Replaces the product of a linear layer, which has neither bias nor communication."""
    given = {name for name, value in others.items() if value} - {"tp_group", "wgrad_deferral_limit"}
    assert not given, f"a product in INT4 with {given}"
    return multiply(input, weight, rounding=partial(fake_int4, group_size=group_size))


def fake_quantize_experts(chunks: Any, shape: ModelShape, hf_checkpoint: str, group_size: int) -> int:
    """Round the weights in the layers that are INT4 in ``hf_checkpoint``. Returns their number on this rank.

    The experts of a layer count as one.

    Raises:
        ConfigError: a layer's weights are partly INT4, or are divided among ranks inside a group.
    """
    quantizer = find_quantizer(hf_checkpoint)
    assert quantizer is not None, "precision_rules requires an INT4 checkpoint"
    tensors = ModelTensors(chunks, shape.family, shape.vocab_size, shape.is_tied)
    # Tensors are found by identity: == would compare their elements.
    layers = {
        id(module.weight): module
        for chunk in chunks_of(chunks)
        for module in chunk.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | ExpertLinear) and module.weight is not None
    }
    rank = mpu.get_expert_model_parallel_rank()
    names: defaultdict[int, list[str]] = defaultdict(list)
    for tensor in tensors.local.values():
        names[id(tensor.owner)] += tensors.hf_names(tensor.place, rank)
    rounded = {owner: [name for name in owned if name in quantizer.names] for owner, owned in names.items()}
    for owner, (first, *_) in [one for one in rounded.items() if one[1]]:
        layer = layers[owner]
        if others := [name for name in names[owner] if name not in quantizer.names]:
            raise ConfigError(
                f"OPEN_TRAINING_INT4_FAKE_QAT_FLAG: --hf-checkpoint {hf_checkpoint} has {first} in INT4 and "
                f"{others[0]} not; the trainer has them in one tensor. Convert it again."
            )
        if (columns := layer.weight.shape[1]) % group_size:
            raise ConfigError(
                f"OPEN_TRAINING_INT4_FAKE_QAT_FLAG: a rank has {columns} columns of {first}, which groups of "
                f"{group_size} do not divide. Lower --expert-tensor-parallel-size."
            )
        if isinstance(layer, ExpertLinear):
            layer.rounding = partial(_fake_int4_experts, group_size=group_size)
        else:
            layer._forward_impl = partial(_multiply, group_size)
    return sum(map(bool, rounded.values()))


def token_multiple(config: Any) -> int:
    """The tokens of a rank must be a multiple of this for FP8 products."""
    return int(fp8_utils.get_fp8_align_size(config.fp8_recipe)) if config.fp8 else 1


def check_recipe(config: Any) -> None:
    """Check the FP8 recipe before the first step.

    Raises:
        ConfigError: this TransformerEngine does not have the recipe, or --fp8-quantizer-factory names no function.
    """
    try:
        fp8_utils.get_fp8_recipe(config)
    except (ValueError, AssertionError) as error:
        name = Fp8Recipe(config.fp8_recipe).value
        factory = f" with --fp8-quantizer-factory {config.fp8_quantizer_factory}" if name == "custom" else ""
        raise ConfigError(f"--fp8-recipe {name}{factory}: {error}") from error


def readable(weight: torch.Tensor) -> torch.Tensor:
    """``weight``, with --fp8-param-gather converted to bf16: values times scale."""
    if fp8_utils.is_float8tensor(weight):
        whole: torch.Tensor = fp8_utils.dequantize_fp8_tensor(weight)
        return whole.detach()
    return weight.detach()


_BLOCK = 128


@dataclass(frozen=True)
class Products:
    """The matrix product of an engine.

    Attributes:
        has_8_bits: tokens and weights are rounded to float8_e4m3fn.
        has_power_of_two_scales: the scales of weights are rounded up to powers of two (UE8M0).
    """

    has_8_bits: bool = False
    has_power_of_two_scales: bool = False

    def of_one(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[t, K] x [N, K] -> [t, N]`` in bf16."""
        out = tokens.new_empty(tokens.shape[0], weight.shape[0])
        if out.numel() == 0:
            return out
        import deep_gemm

        if self.has_8_bits:
            deep_gemm.fp8_gemm_nt(self._tokens(tokens), self._weight(weight), out)
        else:
            deep_gemm.bf16_gemm_nt(tokens.contiguous(), weight.contiguous(), out)
        return out

    def of_many(self, tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """``[t, K] x [E, N, K] -> [t, N]`` in bf16: rows sorted by expert. Those of expert e end at ``ends[e]``."""
        import deep_gemm

        rows, owners = _in_blocks_of_rows(ends.diff(prepend=ends.new_zeros(1)).tolist(), tokens.device)
        out = tokens.new_empty(len(owners), weights.shape[1])
        padded = tokens.new_zeros(len(owners), tokens.shape[1]).index_copy(0, rows, tokens)
        if self.has_8_bits:
            values, scales = zip(*(self._weight(weight) for weight in weights), strict=True)
            stacked = torch.stack(values), torch.stack(scales)
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(self._tokens(padded), stacked, out, owners)
        else:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(padded, weights.contiguous(), out, owners)
        return out.index_select(0, rows)

    def of_first(self, tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """:meth:`of_one` for the only one of ``weights``."""
        return self.of_one(tokens, weights[0])

    def can_multiply(self, weight: torch.Tensor) -> bool:
        """Whether there is a kernel for a ``weight`` of this shape, ``[N, K]``."""
        rows, columns = weight.shape
        return not self.has_8_bits or (rows % 64 == 0 and columns % _BLOCK == 0)

    def _tokens(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8(tokens, (1, _BLOCK), has_power_of_two_scales=self.has_power_of_two_scales)

    def _weight(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8(weight, (_BLOCK, _BLOCK), has_power_of_two_scales=self.has_power_of_two_scales)


def products_of(hf_checkpoint: str) -> Products:
    """The product of engines that load ``hf_checkpoint``.

    Raises:
        ConfigError: its weights are quantized in another way than 8-bit blocks of 128 x 128.
    """
    config = load_model_config(hf_checkpoint).get("quantization_config")
    if config is None:
        return Products()
    if config.get("quant_method") != "fp8" or config.get("weight_block_size") != [_BLOCK, _BLOCK]:
        raise ConfigError(
            f"--megatron-deepgemm-forward-layers: --hf-checkpoint {hf_checkpoint} is quantized as "
            f"{config.get('quant_method')} with weight_block_size {config.get('weight_block_size')}, and deep_gemm "
            f"multiplies bf16 and fp8 in blocks of {_BLOCK} x {_BLOCK}: leave the flag out, or use such a checkpoint."
        )
    return Products(True, has_power_of_two_scales=config.get("scale_fmt") == "ue8m0")


def _in_blocks_of_rows(counts: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad each expert's rows to whole blocks.

    Returns:
        The padded position of each row, int64 ``[t]``, and the expert of each padded position, int32, -1 for padding.
    """
    import deep_gemm

    size = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
    rows, owners, begin = [], [], 0
    for expert, count in enumerate(counts):
        padded = -(-count // size) * size  # the kernel multiplies a block with one expert's weight
        rows.append(torch.arange(begin, begin + count))
        owners.append(torch.full((padded,), -1, dtype=torch.int32).index_fill(0, torch.arange(count), expert))
        begin += padded
    return torch.cat(rows).to(device), torch.cat(owners).to(device)


_LINEAR = ("self_attention", "mlp.linear_fc1", "mlp.linear_fc2", "mlp.shared_experts")
_EXPERTS = ("mlp.experts",)


def install_deepgemm(chunks: Any, plugins: PluginArgs, hf_checkpoint: str) -> list[str]:
    """Replace the products of the modules that the flags name. A collective. Idempotent.

    Returns:
        Names of the modules on this rank, such as ``3.mlp.linear_fc1``, with the layer's number in the whole model.

    Raises:
        ConfigError: a layer without such modules, a name that matches none, or sizes that deep_gemm cannot multiply.
            Raised on all ranks.
    """
    dense, experts = plugins.megatron_deepgemm_forward_layers, plugins.megatron_deepgemm_moe_forward_layers
    if not dense and not experts:
        return []
    products = products_of(hf_checkpoint)
    linear: dict[str, Any] = {}
    grouped: dict[str, Any] = {}
    if dense:
        names = plugins.megatron_deepgemm_forward_modules
        linear = _select(chunks, dense, names or _LINEAR, "forward", (ColumnParallelLinear, RowParallelLinear))
    if experts:
        names = plugins.megatron_deepgemm_moe_forward_modules
        grouped = _select(chunks, experts, names or _EXPERTS, "moe-forward", (GroupedExperts,))
    weights = [(name, module.weight) for name, module in linear.items()]
    stacks = [(name, stack) for name, module in grouped.items() for stack in (module.linear_fc1, module.linear_fc2)]
    weights += [(name, single) for name, stack in stacks for _, single in experts_of(name, stack.weight)[:1]]
    raise_everywhere(
        [
            f"deep_gemm cannot multiply with {name}, of which a rank has {' x '.join(map(str, weight.shape))}: in 8 "
            "bits the sizes must be multiples of 64 and 128. Leave it out of the --megatron-deepgemm flags."
            for name, weight in weights
            if not products.can_multiply(weight)
        ]
    )
    for module in linear.values():
        module._forward_impl = partial(_linear, products)  # Megatron's linear layers call it by keywords
    for _, stack in stacks:
        stack.product = products.of_many
    return [*linear, *grouped]


def enable_deepgemm_all_forward(args: Namespace, model: Any, store_prefix: str) -> None:
    """Hook for ``--custom-megatron-before-log-prob-hook-path``. Not needed: the flags have the same effect."""
    install_deepgemm(model, from_args(PluginArgs, args), args.hf_checkpoint)


def enable_deepgemm_all_forward_before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Hook for ``--custom-megatron-before-train-step-hook-path``. Not needed: the flags have the same effect."""
    install_deepgemm(model, from_args(PluginArgs, args), args.hf_checkpoint)


def _select(
    chunks: Any, layers: Sequence[int], suffixes: Sequence[str], which: str, kinds: tuple[type, ...]
) -> dict[str, Any]:
    """Modules of these ``kinds`` in the ``layers`` on this rank, whose names or whose parents' names have a suffix."""
    found: dict[str, Any] = {}
    hits: set[tuple[str, int | str]] = set()
    for chunk in chunks_of(chunks):
        for layer in chunk.decoder.layers:
            number = layer.layer_number - 1
            for name, module in layer.named_modules() if number in layers else ():
                fitting = [suffix for suffix in suffixes if f".{suffix}." in f".{name}."]
                if isinstance(module, kinds) and fitting:
                    found[f"{number}.{name}"] = module
                    hits |= {("layer", number), *(("module", suffix) for suffix in fitting)}
    everywhere: list[set[tuple[str, int | str]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, hits)
    hits = set().union(*everywhere)
    flag = f"--megatron-deepgemm-{which}"
    problems = [
        f"{flag}-layers {number}: no such layer has such modules." for number in layers if ("layer", number) not in hits
    ]
    if suffixes not in (_LINEAR, _EXPERTS):  # a model need not have all default modules
        problems += [
            f"{flag}-modules {suffix} finds no module in these layers; names look like self_attention.linear_proj, "
            "mlp.linear_fc1, mlp.experts."
            for suffix in suffixes
            if ("module", suffix) not in hits
        ]
    if problems:
        raise ConfigError(problems)
    return found


def _linear(
    products: Products,
    *,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **_: Any,
) -> torch.Tensor:
    """Replaces the product of Megatron's linear layers, with its communication."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        # The identity, whose backward pass sums the gradients of the tensor ranks.
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    out = multiply(input, weight, product=products.of_first)
    return out if bias is None else out + bias
