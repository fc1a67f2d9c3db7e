"""Experts of a layer as two grouped products, and the dispatcher that sorts tokens by expert.

    tokens [t, h] -> sorted rows [t * topk, h] -> products with linear_fc1 and linear_fc2 -> sums per token [t, h]

A parameter holds the experts of this rank one below the other, ``[experts * N, K]``. ``ModelTensors`` and checkpoints
have single experts, which are views. The number of operator calls does not depend on the number of experts.

Waits for the device per layer: none on one rank of experts. With expert parallelism, or experts cut by tensor
parallelism, the forward pass copies the sizes of the all-to-all to the host once, and the backward pass waits for
nothing. This holds for bf16 on a GPU of compute capability 9.0 or more. Elsewhere, ``grouped_mm`` is a loop of torch,
and rows that are no multiple of 16 bytes take a loop here. Both wait for the borders of the groups.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec

from slime.utils import accelerator

_ALIGNMENT = 16
"""Bytes. ``grouped_mm`` refuses rows of another multiple."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows ``[t, K]``, weights ``[E, N, K]``, int32 ends ``[E]``) -> ``[t, N]``. Expert e has the rows before ends[e]."""


def grouped_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``[t, K] x [E, K, N] -> [t, N]``, or ``[M, t] x [t, N] -> [E, M, N]``, where ``ends`` divides t among experts."""
    if len(ends) == 1:
        return left @ right[0] if right.dim() == 3 else (left @ right).unsqueeze(0)
    widths = (right.shape[-1], left.shape[1] if right.dim() == 3 else left.shape[0])
    if all(width * left.element_size() % _ALIGNMENT == 0 for width in widths):
        return _grouped_mm(left, right, offs=ends)
    bounds = [0, *ends.tolist()]
    groups = [slice(*pair) for pair in itertools.pairwise(bounds)]
    if right.dim() == 3:
        return torch.cat([left[rows] @ weight for rows, weight in zip(groups, right, strict=True)])
    return torch.stack([left[:, rows] @ right[rows] for rows in groups])


try:
    _grouped_mm = F.grouped_mm
except AttributeError:  # before torch 2.10
    _grouped_mm = torch._grouped_mm  # type: ignore[assignment]


def linear_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The usual :data:`Product`."""
    return grouped_product(rows, weights.mT, ends)


class _Multiply(torch.autograd.Function):
    """Rows times the weights of their experts. Gradients pass straight through ``rounding``."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, product: Product, rounding: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.rounding = rounding
        if not len(rows):
            return rows.new_zeros(0, weight.shape[0] // len(ends))
        return product(rows, _unstacked(rounding(weight), ends), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        wants_rows, wants_weight, *_ = ctx.needs_input_grad
        if not len(rows):  # no stride of an empty tensor is valid
            return torch.zeros_like(rows), torch.zeros_like(weight) if wants_weight else None, None, None, None
        gradient = gradients[0].contiguous()
        # Rounded again: a kept copy would take as much memory as the experts.
        to_rows = grouped_product(gradient, _unstacked(ctx.rounding(weight), ends), ends) if wants_rows else None
        to_weight = grouped_product(gradient.mT, rows, ends).view_as(weight) if wants_weight else None
        return to_rows, to_weight, None, None, None


def _unstacked(weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return weight.view(len(ends), -1, weight.shape[1])


def _unrounded(weight: torch.Tensor) -> torch.Tensor:
    return weight


def multiply(
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor | None = None,
    *,
    product: Product = linear_product,
    rounding: Callable[[torch.Tensor], torch.Tensor] = _unrounded,
) -> torch.Tensor:
    """``[.., K]``, sorted by expert, times ``[experts * N, K]`` -> ``[.., N]``. Without ``ends`` there is one expert.

    Args:
        product: of the forward pass. The backward pass has the usual products.
        rounding: gives the weights that both passes compute with. Gradients pass straight through it.
    """
    flat = rows.flatten(0, -2)
    if ends is None:
        ends = torch.full((1,), len(flat), dtype=torch.int32, device=rows.device)
    out: torch.Tensor = _Multiply.apply(flat, weight, ends, product, rounding)  # type: ignore[no-untyped-call]
    return out.view(*rows.shape[:-1], out.shape[-1])


class ExpertLinear(torch.nn.Module):
    """One linear layer of all experts on this rank. ``product`` and ``rounding``: see :func:`multiply`."""

    def __init__(self, config: Any, num_experts: int, rows: int, columns: int, *, split_dim: int) -> None:
        """``rows`` x ``columns`` of an expert on this rank. Tensor parallelism divides ``split_dim``."""
        super().__init__()
        device = None if config.use_cpu_initialization else accelerator.current().device()
        self.weight = torch.nn.Parameter(
            torch.empty(num_experts * rows, columns, dtype=config.params_dtype, device=device)
        )
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=split_dim, stride=1)
        marks = vars(self.weight)
        marks["allreduce"] = config.expert_model_parallel_size == 1  # else another group sums the gradient
        marks["num_experts"] = num_experts
        self.product: Product = linear_product
        self.rounding: Callable[[torch.Tensor], torch.Tensor] = _unrounded

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """``[t, K]``, sorted by expert -> ``[t, N]``."""
        return multiply(rows, self.weight, ends, product=self.product, rounding=self.rounding)


def experts_of(name: str, parameter: torch.Tensor, count: int | None = None) -> list[tuple[str, torch.Tensor]]:
    """Names and views of the single experts in a parameter of :class:`ExpertLinear`, or any other parameter alone.

    Args:
        count: experts in it, by default those that it is marked with.
    """
    count = count or vars(parameter).get("num_experts")
    if count is None or ".mlp.experts.linear_" not in f".{name}":
        return [(name, parameter)]
    parts = parameter.detach().chunk(count)
    return [(name.replace(".experts.", f".experts.local_experts.{i}."), part) for i, part in enumerate(parts)]


class GroupedExperts(torch.nn.Module):
    """Replaces Megatron's ``SequentialMLP``: equal results, and the same tensors in a checkpoint."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any) -> None:
        super().__init__()
        self.config = config
        self._num_experts = num_local_experts
        self.groups = pg_collection
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self.linear_fc1 = ExpertLinear(config, num_local_experts, 2 * width, config.hidden_size, split_dim=0)
        self.linear_fc2 = ExpertLinear(config, num_local_experts, config.hidden_size, width, split_dim=1)
        self._recomputes = config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """``hidden``: ``[t, h]``, sorted by expert. ``probs``: ``[t]``, factors of the result's rows."""
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        gate_up = self.linear_fc1(hidden, ends)
        if not self._recomputes:
            return self.linear_fc2(self._activate(gate_up, probs), ends), None
        checkpoint = CheckpointWithoutOutput(fp8=None)  # False would count as FP8
        out = self.linear_fc2(checkpoint.checkpoint(self._activate, gate_up, probs), ends)
        checkpoint.discard_output_and_register_recompute(out)
        return out, None

    def _activate(self, gate_up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        if self.config.bias_activation_fusion:
            fused: torch.Tensor = weighted_bias_swiglu_impl(gate_up, None, probs.unsqueeze(-1))
            return fused
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) * up * probs.unsqueeze(-1)).to(gate_up.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The tensors of ``SequentialMLP``: one per expert, gate and up apart."""
        ranks = self.groups
        replica = (0, 0, ranks.expt_dp.rank())
        sharded = {}
        for name, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            build = partial(self._single_experts, sharded_offsets, is_gated=name == "linear_fc1")
            sharded[f"{prefix}{name}.weight"] = ShardedTensorFactory(
                f"{prefix}experts.{name}.weight", linear.weight, build, torch.cat, replica
            )
        return sharded

    @torch.no_grad()
    def _single_experts(
        self, offsets: Any, key: str, tensor: torch.Tensor, replica: Any, flattened: Any = None, *, is_gated: bool
    ) -> list[ShardedTensor]:
        experts, tensors = self.groups.ep, self.groups.expt_tp
        axis, first, total = len(offsets), experts.rank() * self._num_experts, experts.size() * self._num_experts
        parts: list[ShardedTensor] = []
        for number, expert in enumerate(tensor.chunk(self._num_experts), first):
            for half, piece in enumerate(expert.chunk(2) if is_gated else [expert]):
                place = tensors.rank() + half * tensors.size()
                split = (axis + 1, place, 2 * tensors.size()) if is_gated else (axis + 2, place, tensors.size())
                where = (*offsets, (axis, number, total), split)
                part = ShardedTensor.from_rank_offsets(
                    key, piece, *where, replica_id=replica, prepend_axis_num=axis + 1
                )
                parts.append(part)
        return parts


class _Spread(torch.autograd.Function):
    """``source[index]``. The gradient sums the rows ``places`` ``[sources, n]``: no atomic addition, fp32 sums."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, index: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _sum_rows(gradients[0], ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    """The transpose of :class:`_Spread`: sums of the rows ``places``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        return _sum_rows(rows, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None


def _sum_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if places.shape[1] == 1:
        return rows.index_select(0, places[:, 0])
    return F.embedding_bag(places, rows.contiguous(), mode="sum")  # gathers and adds without a copy in between


@dataclasses.dataclass(frozen=True)
class _Order:
    """A permutation of rows, or a choice of several rows per source.

    Attributes:
        index: the source of each row, ``[rows]``.
        places: the rows of each source, ``[sources, n]``.
    """

    index: torch.Tensor
    places: torch.Tensor

    def spread(self, source: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Spread.apply(source, self.index, self.places)  # type: ignore[no-untyped-call]
        return out

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Collect.apply(rows, self.index, self.places)  # type: ignore[no-untyped-call]
        return out


class SortingDispatcher(MoETokenDispatcher):
    """Megatron's alltoall dispatcher without ``masked_select`` and with the host waits of the module docstring.

    Drops no tokens. The methods are called in the order of their definition.
    """

    def __init__(self, num_local_experts: int, first_expert: int, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._num_local = num_local_experts
        self._local = slice(first_expert, first_expert + num_local_experts)
        self._is_divided = self.ep_size * self.tp_size > 1
        self._sent: list[int] = []
        self._received: list[list[int]] = []

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[.., h]``, bool and weights ``[t, experts]`` -> rows and weights, sorted by expert, then by token."""
        self._shape, self._sum_dtype = hidden_states.shape, probs.dtype
        topk, (_, num_experts) = self.config.moe_router_topk, routing_map.shape
        # The chosen experts have the largest numbers, the first expert the very largest.
        numbers = torch.arange(num_experts, 0, -1, device=routing_map.device, dtype=torch.int32)
        found = (routing_map * numbers).topk(topk, dim=1).values
        # A replayed choice may name an expert twice. The row that is left over goes to the last expert with weight 0.
        experts = (num_experts - found.clamp(min=1)).flatten()
        sorted_experts, order = experts.sort(stable=True)
        token = order // topk
        self._tokens = _Order(token, order.argsort().view(-1, topk))
        last = torch.arange(num_experts, device=order.device, dtype=experts.dtype)
        ends = torch.searchsorted(sorted_experts, last, right=True)
        self._counts = torch.cat([ends[:1], ends[1:] - ends[:-1]])
        weights = probs.flatten().index_select(0, token * num_experts + sorted_experts)
        rows = self._tokens.spread(hidden_states.view(-1, self._shape[-1]))
        return rows, weights * found.flatten().index_select(0, order).bool()

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that this rank's experts get from the ranks with the same part of each expert."""
        if not self._is_divided:
            return hidden_states, probs
        everywhere = self._counts.new_empty(self.ep_size * self.tp_size * len(self._counts))
        dist.all_gather_into_tensor(everywhere, self._counts, group=self.tp_ep_group)
        by_rank = everywhere.view(self.ep_size, self.tp_size, -1).transpose(0, 1)[..., self._local]
        self._chunks = by_rank.reshape(-1, self._num_local)  # in the order in which rows arrive
        sent = self._counts.view(self.ep_size, -1).sum(1)
        sizes = torch.cat([sent, self._chunks.sum(1)]).tolist()  # the only wait for the device
        self._sent, received = sizes[: self.ep_size], sizes[self.ep_size :]
        self._received = [received[i : i + self.ep_size] for i in range(0, len(received), self.ep_size)]
        mine = self._received[self.tp_rank]
        rows = all_to_all(self.ep_group, hidden_states, mine, self._sent)
        return rows, all_to_all(self.ep_group, probs, mine, self._sent)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows sorted by local expert, their numbers per expert, their weights."""
        if not self._is_divided:
            return hidden_states, self._counts, probs
        if self.tp_size > 1:
            sizes = list(map(sum, self._received))
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, group=self.tp_group, output_split_sizes=sizes
            )
            probs = gather_from_sequence_parallel_region(probs, group=self.tp_group, output_split_sizes=sizes)
        owners = torch.arange(self._num_local, device=probs.device).repeat(len(self._chunks))
        # With the length it need not be read from the device.
        owners = owners.repeat_interleave(self._chunks.flatten(), output_size=sum(map(sum, self._received)))
        index = owners.argsort(stable=True)
        self._arrived = _Order(index, index.argsort().unsqueeze(1))
        return self._arrived.spread(hidden_states), self._chunks.sum(0), probs.index_select(0, index)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Results in the order of arrival, summed over the ranks with parts of the same experts."""
        if not self._is_divided:
            return hidden_states
        hidden_states = self._arrived.collect(hidden_states)
        if self.tp_size > 1:
            sizes = list(map(sum, self._received))
            dtype = hidden_states.dtype
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self._sum_dtype), group=self.tp_group, input_split_sizes=sizes
            ).to(dtype)
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Results on the ranks of their tokens."""
        if not self._is_divided:
            return hidden_states
        rows: torch.Tensor = all_to_all(self.ep_group, hidden_states, self._sent, self._received[self.tp_rank])
        return rows

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum of each token's rows, in the shape of the input."""
        return self._tokens.collect(hidden_states).view(self._shape)


def sort_tokens(model: torch.nn.Module) -> None:
    """Give the layers of grouped experts in a new model their :class:`SortingDispatcher`, unless it is to be flex."""
    for layer in model.modules():
        if not isinstance(layer, MoELayer) or layer.config.moe_token_dispatcher_type == "flex":
            continue
        if isinstance(layer.experts, GroupedExperts | TEGroupedMLP):
            stock = layer.token_dispatcher
            groups = ProcessGroupCollection(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
            layer.token_dispatcher = SortingDispatcher(
                layer.num_local_experts, layer.local_expert_indices[0], layer.config, groups
            )


def group_experts(layer: Any) -> None:
    """Change the spec of a decoder layer: Megatron's experts become :class:`GroupedExperts`.

    A dense layer and a user's classes of experts stay. Idempotent. The model needs :func:`sort_tokens`.
    """
    mlp = layer.submodules.mlp
    if not isinstance(mlp, ModuleSpec) or mlp.module is not MoELayer:
        return
    experts = mlp.submodules.experts
    if not isinstance(experts, ModuleSpec):
        return
    parts = experts.submodules
    if experts.module is GroupedMLP or (  # Megatron's choice for moe_grouped_gemm; it needs a package
        experts.module is SequentialMLP
        and (parts.linear_fc1, parts.linear_fc2) == (ColumnParallelLinear, RowParallelLinear)
    ):
        submodules = dataclasses.replace(mlp.submodules, experts=ModuleSpec(module=GroupedExperts))
        layer.submodules.mlp = dataclasses.replace(mlp, submodules=submodules)
