"""Makes stock megatron-core 0.16.1 usable: :func:`install` is the first call of every trainer process.

Repairs defects that appear without TransformerEngine and Apex, and on gloo. Nothing is repaired at import. Each
function documents the fault, its cause, and when to delete it. ``tests/unit/megatron_utils`` shows the silent ones.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
import weakref
from typing import Any

import torch
import torch.nn.functional as F

from slime.backends.megatron_utils import cpu_import
from slime.utils import accelerator


@functools.cache
def install() -> None:
    """Rewrite megatron.core during its import (cpu only) and repair its defects. Idempotent.

    Must run before the first import of ``megatron.core``. Imports the parts that a trainer uses.
    """
    _silence_known_warnings()
    if accelerator.current().is_cpu:
        cpu_import.install()
        with cpu_import.light_import():
            _import_megatron()
    else:
        _import_megatron()
    repair_reduce()
    repair_missing_transformer_engine()
    repair_packed_rope()
    repair_padding_in_expert_bias()
    if accelerator.current().is_cpu:
        repair_lone_groups_on_cpu()
        repair_swiglu_on_cpu()
        repair_expert_dispatch_on_cpu()
        repair_overlapped_sends_on_cpu()
    repair_gradient_norm()
    repair_optimizer_slices()
    repair_mixed_precision_optimizers()
    repair_distributed_optimizer_checkpoints()
    repair_readers_that_run_code()


def _import_megatron() -> None:
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401


def _silence_known_warnings() -> None:
    """Hide Megatron's warnings about its use of deprecated names, printed once per rank."""
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning)


def repair_reduce() -> None:
    """``tensor_parallel.mappings._reduce`` drops its result for a non-contiguous input.

    Why: it reduces ``x.contiguous()``, a copy then, and returns ``x``. Silent: gradients stay unreduced.
    Upstream: present in Megatron-LM main at core_v0.16.1. Delete when ``_reduce`` returns the reduced tensor.
    """
    from megatron.core.tensor_parallel import mappings

    def _reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
        if group.size() == 1:
            return x
        x = x.contiguous()
        torch.distributed.all_reduce(x, group=group)
        return x

    mappings._reduce = _reduce


def repair_gradient_norm() -> None:
    """The norm of the gradients is computed tensor after tensor, and the host waits for the device after each.

    Why: ``local_multi_tensor_l2_norm`` collects the norms with ``torch.tensor``, which reads each of them.
    Upstream: core_v0.16.1 without TransformerEngine and Apex. Delete when the norms are added up on the device.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    def l2_norm(_: Any, __: Any, tensor_lists: list[list[torch.Tensor]], *___: Any) -> tuple[torch.Tensor, None]:
        norms = [norm for tensors in tensor_lists for norm in torch._foreach_norm(tensors)]
        return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm


def repair_optimizer_slices() -> None:
    """``fully_sharded_model_space`` cannot be saved, and ``fully_reshardable`` gathers the states on every rank.

    Why: the first gives flattened ranges to ``ShardedTensor``, which refuses them. The second has three fp32 tensors of
    all weights of a model-parallel rank on each of its data-parallel ranks, and copies of two of them on the device.
    Upstream: core_v0.16.1. Delete when a format that loads on any layout is saved without gathering.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from slime.backends.megatron_utils.checkpoint.shard_files import sliced_states

    DistributedOptimizer.sharded_param_state_fs_model_space = sliced_states


def repair_readers_that_run_code() -> None:
    """A checkpoint runs code in the process that loads it, and one with the flags of another program does not load.

    Why: ``FileSystemReader`` of torch unpickles ``.metadata`` without a check. ``common.pt`` is checked, and its flags
    may have classes of the program that wrote it.
    Upstream: core_v0.16.1. Delete when both are read as plain values.
    """
    from megatron.core.dist_checkpointing.strategies import common
    from megatron.core.dist_checkpointing.strategies import torch as sharded

    from slime.backends.megatron_utils.checkpoint.shard_files import load_common
    from slime.backends.training.pieces import PlainReader

    sharded.FileSystemReader = PlainReader
    common.TorchCommonLoadStrategy.load_common = lambda _, directory: load_common(directory)


def repair_mixed_precision_optimizers() -> None:
    """Optimizers mix up the states of a model whose parameters have several dtypes.

    Why: both keep fp32 parameters apart from 16-bit ones, and count a parameter's place in another order than the inner
    optimizer has it. ``DistributedOptimizer`` counts in the order of the gradient buffers, but hands over the fp32
    parameters of a group first. ``Float16OptimizerWithFloat16Params`` counts 16-bit ones only. A checkpoint then holds
    the states of other parameters if their sizes happen to be equal, and cannot be written otherwise.
    Upstream: core_v0.16.1. Delete when a model with parameters of two dtypes is resumed bit for bit without this.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as WholeOptimizer

    stock_ranges = DistributedOptimizer._build_optimizer_group_ranges
    stock_init, stock_sharded = WholeOptimizer.__init__, WholeOptimizer.sharded_state_dict

    def build_ranges(cls: Any, param_groups: Any, gbuf_ranges: Any) -> Any:
        _, group_ranges = stock_ranges(param_groups, gbuf_ranges)
        places = {}
        for index, group in enumerate(group_ranges):
            # fp32 first, as in the inner optimizer.
            group["params"].sort(key=lambda parameter: parameter.dtype != torch.float32)
            places.update({parameter: (index, place) for place, parameter in enumerate(group["params"])})
        return places, group_ranges

    def __init__(self: Any, *args: Any, **kw: Any) -> None:
        stock_init(self, *args, **kw)
        if not self.is_stub_optimizer:
            for group, wide in zip(self.optimizer.param_groups, self.fp32_from_fp32_groups, strict=True):
                apart = {id(parameter) for parameter in wide}
                # The fp32 parameters last, as ``sharded_state_dict`` counts them below.
                group["params"] = [main for main in group["params"] if id(main) not in apart] + wide

    def sharded_state_dict(self: Any, *args: Any, **kw: Any) -> Any:
        if self.is_stub_optimizer:
            return stock_sharded(self, *args, **kw)
        groups = self.float16_groups
        self.float16_groups = [[*a, *b] for a, b in zip(groups, self.fp32_from_fp32_groups, strict=True)]
        try:
            return stock_sharded(self, *args, **kw)
        finally:
            self.float16_groups = groups

    DistributedOptimizer._build_optimizer_group_ranges = classmethod(build_ranges)
    WholeOptimizer.__init__, WholeOptimizer.sharded_state_dict = __init__, sharded_state_dict


def repair_distributed_optimizer_checkpoints() -> None:
    """``DistributedOptimizer`` cannot save and load torch's Adam, which ``optimizer`` always chooses.

    Three faults, all around Adam's per-parameter ``step`` tensor, which TE's and Apex' Adam do not have:

    1. ``load_state_dict`` installs *one shared* ``step`` tensor. Adam advances it in place once per parameter, so bias
       correction is silently wrong after a resume.
    2. ``sharded_state_dict`` asserts exactly one step value, but an Adam that has not stepped has none.
    3. The parameter-state accessors copy ``step`` as if it were sharded like the parameter (KeyError), and write into a
       leaf that requires grad (RuntimeError in fp32).

    Upstream: core_v0.16.1. Delete when a resumed run with torch's Adam equals the uninterrupted one without this.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    stock_get = DistributedOptimizer._get_main_param_and_optimizer_states
    stock_load = DistributedOptimizer.load_state_dict
    stock_sharded = DistributedOptimizer.sharded_state_dict

    def _get(self: Any, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: state for name, state in stock_get(self, model_param).items() if name != "step"}

    @torch.no_grad()
    def _set(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, index = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][index]
        for name, target in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step":
                target.copy_(tensors[name])

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        stock_load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()  # one tensor per parameter (fault 1)

    def sharded_state_dict(self: Any, model_state: Any = None, is_loading: bool = False, *args: Any, **kw: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    state = self.optimizer.state[param]
                    if not state:
                        zeros = torch.zeros_like
                        state.update(step=torch.tensor(0.0), exp_avg=zeros(param), exp_avg_sq=zeros(param))  # fault 2
        return stock_sharded(self, model_state or {}, is_loading, *args, **kw)

    DistributedOptimizer._get_main_param_and_optimizer_states = _get
    DistributedOptimizer._set_main_param_and_optimizer_states = _set
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer.sharded_state_dict = sharded_state_dict


def repair_missing_transformer_engine() -> None:
    """Two modules use names of TransformerEngine that do not exist without it.

    Why: ``moe_utils`` reads ``te_general_gemm``, which only a successful import defines (NameError in routers), and
    ``multi_latent_attention`` assumes TransformerEngine although its classes are mocks then (TypeError in
    ``isinstance``).
    Upstream: core_v0.16.1. Delete when a MoE layer and a latent-attention layer build and run without TE.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False


def repair_packed_rope() -> None:
    """Rope on packed sequences copies their lengths to the host in every layer, for queries and for keys.

    Why: ``_apply_rotary_pos_emb_thd`` cuts the rows into sequences to give each its angles. Every copy waits for the
    device, and a recomputed layer copies again. A table of ``model.attention`` already has the rows' order.
    Upstream: core_v0.16.1, without TransformerEngine's fused kernel. Delete when it takes positions.
    """
    from megatron.core.models.common.embeddings import rope_utils

    from slime.backends.megatron_utils.model.attention import rotate

    stock = rope_utils._apply_rotary_pos_emb_thd

    def apply(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        *args: Any,
        **kw: Any,
    ) -> torch.Tensor:
        if freqs.dim() == 3:  # Megatron's angles have four dimensions
            return rotate(t, freqs, is_interleaved=rotary_interleaved, is_latent=multi_latent_attention)
        roped: torch.Tensor = stock(t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, *args, **kw)
        return roped

    rope_utils._apply_rotary_pos_emb_thd = apply


def repair_padding_in_expert_bias() -> None:
    """A router with an expert bias fails on a padding mask (RuntimeError of shapes), or counts the wrong experts.

    Why: ``_apply_expert_bias`` combines the choices ``[tokens, experts]`` with a mask ``[tokens]`` that lacks a
    dimension. A product, because the complement of ``RowCounts`` is a number.
    Upstream: core_v0.16.1. Delete when the mask is unsqueezed there.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    stock = TopKRouter._apply_expert_bias

    def apply(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        stock(self, routing_map if padding_mask is None else routing_map * ~padding_mask.unsqueeze(-1))

    TopKRouter._apply_expert_bias = apply


def repair_lone_groups_on_cpu() -> None:
    """Every process group of one rank has a thread of gloo, which wakes up 100 times per second.

    Why: ``create_group`` makes a new group for each kind of parallelism, also for the same single rank. On one rank 20
    threads took 1.1 % of a core, also while engines generate. Nothing is sent in such a group, so one is enough.
    Upstream: core_v0.16.1. Delete when gloo's groups share a thread.
    """
    from megatron.core import parallel_state

    stock = parallel_state.create_group
    # Per default group. A strong reference would keep the threads of destroyed groups alive until the process exits.
    lone: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()

    def create_group(ranks: list[int], *args: Any, **kw: Any) -> Any:
        if len(ranks) != 1:
            return stock(ranks, *args, **kw)
        groups = lone.setdefault(torch.distributed.group.WORLD, {})
        if ranks[0] not in groups:
            groups[ranks[0]] = stock(ranks, *args, **kw)
        return groups[ranks[0]]

    parallel_state.create_group = create_group


def repair_swiglu_on_cpu() -> None:
    """The gradient of SwiGLU is computed in two halves, which are joined, and sigmoids are computed three times.

    Why: ``swiglu_back`` leaves it to a compiler to make one loop of its operators. None is used on a CPU.
    Upstream: core_v0.16.1. Delete when a CPU has one loop.
    """
    from megatron.core.fusions import fused_bias_swiglu

    class Plain:
        @staticmethod
        def apply(gate_up: torch.Tensor, *_: bool) -> torch.Tensor:
            return swiglu(gate_up)

    class Weighted:
        @staticmethod
        def apply(gate_up: torch.Tensor, weights: torch.Tensor, *_: bool) -> torch.Tensor:
            return (swiglu(gate_up) * weights).to(gate_up.dtype)

    fused_bias_swiglu.SwiGLUFunction, fused_bias_swiglu.WeightedSwiGLUFunction = Plain, Weighted


def repair_expert_dispatch_on_cpu() -> None:
    """Dispatching tokens to experts fails on host tensors.

    1. ``maybe_move_tensor_to_cpu`` returns a host tensor unchanged even if a numpy array is requested, and
       ``all_to_all_single`` then gets tensors as split sizes (TypeError).
    2. gloo cannot gather parts of unequal sizes, which experts cut by tensor parallelism need: they are padded.

    Upstream: core_v0.16.1. Delete the first when the function honors ``as_numpy`` for host tensors, the second when
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


def repair_overlapped_sends_on_cpu() -> None:
    """An interleaved stage releases the memory of an output that gloo has not sent yet.

    Why: ``deallocate_output_tensor`` replaces the ``.data`` of an output before its ``isend`` has been waited for. gloo
    keeps the tensor, not its memory, and another thread reads it once the receiver is ready: silently, it may send
    later content of that memory. This needs a loaded machine, so that the thread is late.
    Upstream: core_v0.16.1, with ``overlap_p2p_comm``. Delete when outputs are released after the wait.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    stock = p2p_communication._p2p_ops

    def exchange(*, tensor_send_prev: Any, tensor_send_next: Any, **others: Any) -> Any:
        # A second tensor on the same memory keeps it until the send is done.
        held = [None if tensor is None else tensor.detach() for tensor in (tensor_send_prev, tensor_send_next)]
        return stock(tensor_send_prev=held[0], tensor_send_next=held[1], **others)

    p2p_communication._p2p_ops = exchange


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
