"""Megatron's optimizer (Adam, SGD, Muon) and its schedule of learning rate and weight decay. Called by ``setup``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as optimizer_module
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer import muon as muon_module
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.backends.megatron_utils.arguments import MuonArgs
from slime.backends.megatron_utils.host_adam import HostUpdate, keep_states_on_host, update_threads
from slime.backends.training.arguments import OptimizerArgs, PrecisionArgs
from slime.backends.training.hf_files import raise_everywhere
from slime.backends.training.optimizer import RateSchedule, StatelessAdam, dtype_of, fuse_adamw


def build_optimizer(
    chunks: list[Any],
    settings: OptimizerArgs,
    precision: PrecisionArgs,
    muon: MuonArgs,
    *,
    is_stateless: bool = False,
) -> Any:
    """The optimizer of the data-parallel wrapped model chunks: fp32 main weights, global clipping, sharded states.

    Args:
        muon: settings of --optimizer muon and dist_muon.
        is_stateless: Adam without moments (--use-stateless-adam).
    """
    config = _config(settings, precision)
    config.overlap_param_gather = chunks[0].ddp_config.overlap_param_gather
    _choose_torch()
    match settings.optimizer:
        case "adam" | "sgd":
            # main weights belong to Megatron, or in the mode for "precision-aware" optimizers to the optimizer
            config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = settings.optimizer_cpu_offload
            # ``init_distributed`` makes no gloo groups.
            optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        case "muon" | "dist_muon":
            optimizer = build_muon(config, chunks, muon, is_layer_wise=settings.optimizer == "dist_muon")
        case other:
            raise ValueError(f"--optimizer {other} is not supported")
    on_host = HostUpdate(
        settings.optimizer_offload_fraction,
        overlaps=settings.overlap_cpu_optimizer_d2h_h2d,
        num_threads=update_threads() if settings.optimizer_cpu_offload else None,
    )
    for part in parts_of(optimizer):
        if is_stateless:
            _forget_moments(part, settings)
        elif settings.optimizer_cpu_offload:
            keep_states_on_host(part, on_host)
        elif part.init_state_fn is None:
            # Megatron has none for sgd, and would call None on loading a checkpoint
            part.init_state_fn = _zero_momentum
        fuse_adamw(part.optimizer)
    return optimizer


def _choose_torch() -> None:
    """Let Megatron make torch's optimizers, whichever packages are installed.

    It takes those of TransformerEngine or Apex if their import succeeds. They keep other states, so that a checkpoint
    would depend on the machine that wrote it. Called before an optimizer is made.
    """
    for module in (optimizer_module, distrib_optimizer):
        module.Adam = torch.optim.AdamW
    optimizer_module.SGD = torch.optim.SGD
    optimizer_module.USING_PYTORCH_OPTIMIZER = True
    distrib_optimizer.HAVE_APEX_OR_TE = False
    distrib_optimizer.USING_TE_OPTIMIZER = distrib_optimizer.USING_APEX_OPTIMIZER = False


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that Megatron has chained, or ``optimizer`` itself."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


# Flags that have the names of Megatron's fields.
_SAME = (
    *("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
    "clip_grad",
)


def _config(settings: OptimizerArgs, precision: PrecisionArgs) -> OptimizerConfig:
    dtype = dtype_of(precision)
    return OptimizerConfig(
        **{name: vars(settings)[name] for name in _SAME},
        bf16=dtype.itemsize == 2 and not precision.fp16,
        fp16=precision.fp16,
        params_dtype=dtype,
        initial_loss_scale=2.0**16,  # fp16 only: Megatron's 2**32 skips dozens of steps at the start
        use_distributed_optimizer=settings.is_distributed,
        fp8_recipe=precision.fp8_recipe if precision.fp8 else None,
    )


def _forget_moments(part: Any, settings: OptimizerArgs) -> None:
    """Let ``part`` step with :class:`StatelessAdam`: same parameter groups, no state, not even for a checkpoint."""
    if part.optimizer is None:  # nothing to train on this rank
        return
    groups = part.optimizer.param_groups  # the same objects: Megatron and the schedule keep references to them
    betas = (settings.adam_beta1, settings.adam_beta2)
    stateless = StatelessAdam([torch.empty(0)], settings.lr, betas, settings.adam_eps, settings.weight_decay)
    stateless.param_groups = groups
    part.optimizer = stateless
    part.init_state_fn = _no_state


def _no_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    pass


def _zero_momentum(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Make the state of torch's SGD before its first step, as the target of loading a checkpoint."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"] != 0 and not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@torch.no_grad()
def reset_moments(optimizer: Any) -> None:
    """Zero Adam's moments and step counts, and the momentum of sgd (--reset-optimizer-states)."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        if inner is None:  # nothing to train on this rank
            continue
        for state in inner.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and name != "master_param":  # which is a weight
                    value.zero_()
            if "step" in state and not isinstance(state["step"], torch.Tensor):
                state["step"] = 0
        for group in inner.param_groups:
            if "step" in group:
                group["step"] = 0


def build_scheduler(optimizer: Any, settings: OptimizerArgs, *, num_steps: int, global_batch_size: int) -> Any:
    """The schedule, counted in rollouts: a step advances it by the rollouts it trained on.

    Always needed: it also exempts norms and biases from weight decay.

    Args:
        num_steps: optimizer steps of the whole run. The decay ends there unless --lr-decay-iters is given.

    Raises:
        ConfigError: the warm-up is not shorter than the decay.
    """
    schedule = RateSchedule.of(settings, num_steps=num_steps, global_batch_size=global_batch_size)
    return OptimizerParamScheduler(
        optimizer,
        **asdict(schedule),
        use_checkpoint_opt_param_scheduler=settings.use_checkpoint_opt_param_scheduler,
        # by default the command line decides, and a checkpoint gives only the number of steps
        override_opt_param_scheduler=not settings.use_checkpoint_opt_param_scheduler,
    )


_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of Muon's paper, section 2.1: fast convergence to 0.7 .. 1.2 instead of exactly 1."""

# Attributes of a weight. Megatron sets two for its Muon: it holds queries, keys and values; it is an expert. The third,
# of ``ExpertLinear``, is the number of experts in it.
_MARKS = ("is_qkv", "expert_tp", "num_experts")

_TOGETHER = 8
"""Experts that are orthogonalized in one product. Each needs several fp32 copies of its matrix."""


def orthogonalize(matrix: torch.Tensor, steps: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular vectors stay, singular values become about 1.

    Args:
        matrix: fp32 ``[.., m, n]``, or with ``group`` the columns ``[.., m, n / ranks]`` of this rank.
        group: ranks that hold the other columns.
    """
    is_wide = group is not None or matrix.shape[-2] <= matrix.shape[-1]
    x = matrix if is_wide else matrix.mT  # the product that is squared is the smaller one
    square = x.square().sum((-2, -1), keepdim=True)
    if group is not None:
        dist.all_reduce(square, group=group)
    x = x / (square.sqrt() + 1e-7)  # a zero gradient stays zero
    for _ in range(steps):
        gram = x @ x.mT
        if group is not None:
            dist.all_reduce(gram, group=group)
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x if is_wide else x.mT


def scale_of(rows: int, columns: int, mode: str) -> float:
    """The factor of the orthogonal matrix, so that its entries do not shrink with its size."""
    match mode:
        case "spectral":
            return math.sqrt(max(rows, columns))
        case "unit_rms_norm":
            return math.sqrt(rows / columns)
        case "shape_scaling":
            return math.sqrt(max(1.0, rows / columns))
        case _:
            raise ValueError(f"--muon-scale-mode {mode} is unknown")


class Muon(torch.optim.Optimizer):
    """Momentum whose update of a matrix is orthogonalized. Takes the arguments that Megatron gives its Muon.

    "Muon is Scalable for LLM Training" (arXiv:2502.16982), equations 1 to 4, for a weight W [m, n] with gradient G:

        M <- mu M + G            O = NewtonSchulz(M), or NewtonSchulz(G + mu M) with Nesterov's momentum
        W <- W - lr (s O + decay W)        s = extra * sqrt(max(m, n)), or as --muon-scale-mode says

    NewtonSchulz starts from X = M / ||M||_F and repeats X <- a X + (b A + c A^2) X with A = X X^T, which takes all
    singular values towards 1. Matrices are weights of linear layers and routers. Adam trains all other parameters.

    Tensor parallelism: a rank holds columns or rows of W. ``duplicated`` gathers the whole matrix on every rank.
    ``distributed`` keeps the columns and sums A over the ranks: only A couples them. Both give the update of the whole
    matrix. ``blockwise`` treats each part as a whole matrix: no communication, other numbers.

    Args:
        is_qkv_fn: whether a weight holds queries, keys and values. ``split_qkv`` treats them as three matrices.
        qkv_split_shapes: rows of queries, keys and values per key head.
        has_output_gate: the rows of queries are followed by as many of a gate, a fourth matrix that Megatron ignores.
        pg_collection: Megatron's process groups. ``tp`` and ``expt_tp`` divide matrices.
        mode: of the tensor parallelism.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        momentum_beta: float,
        use_nesterov: bool,
        weight_decay: float,
        num_ns_steps: int,
        scale_mode: str,
        extra_scale_factor: float,
        split_qkv: bool,
        is_qkv_fn: Callable[[torch.Tensor], bool],
        qkv_split_shapes: list[int],
        pg_collection: Any,
        mode: str,
        fp32_matmul_prec: str,
        has_output_gate: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum_beta})
        self._use_nesterov = use_nesterov
        self._num_steps = num_ns_steps
        self._scale_mode = scale_mode
        self._extra_scale = extra_scale_factor
        self._is_qkv = is_qkv_fn if split_qkv else lambda _: False
        # A gate has as many rows as the queries.
        self._qkv_rows = qkv_split_shapes[:1] * has_output_gate + qkv_split_shapes
        self._groups = pg_collection
        self._mode = mode
        self._precision = fp32_matmul_prec

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients."""
        assert closure is None, "Megatron gives none"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # On a CPU with AMX, oneDNN would multiply in bf16 at "medium": the update depends on the CPU model.
                    with _matmul_precision("highest" if parameter.device.type == "cpu" else self._precision):
                        self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        moment = state["momentum_buffer"].mul_(momentum).add_(gradient)
        direction = gradient + momentum * moment if self._use_nesterov else moment
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(self._direction(parameter, direction).to(parameter.dtype), alpha=group["lr"])

    def _direction(self, parameter: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
        if (num_experts := vars(parameter).get("num_experts")) is not None:
            experts = moment.view(num_experts, -1, moment.shape[1])
            return torch.cat([self._orthogonal(parameter, one) for one in experts.split(_TOGETHER)]).view_as(moment)
        if not self._is_qkv(parameter):
            return self._orthogonal(parameter, moment)
        columns = moment.shape[1]
        heads = moment.view(-1, sum(self._qkv_rows), columns)
        parts = [part.reshape(-1, columns) for part in heads.split(self._qkv_rows, dim=1)]
        done = [self._orthogonal(parameter, part).view(len(heads), -1, columns) for part in parts]
        return torch.cat(done, dim=1).view_as(moment)

    def _orthogonal(self, parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Of the whole matrix, this rank's part, with its factor."""
        group, dim = self._shards(parameter)
        size = list(part.shape)
        if group is None:
            result = orthogonalize(part.float(), self._num_steps)
        else:
            size[dim] *= group.size()
            if self._mode == "duplicated":
                whole = orthogonalize(_gathered(part.float(), dim, group), self._num_steps)
                result = whole.chunk(group.size(), dim)[group.rank()]
            else:
                columns = part.float() if dim == -1 else part.float().mT
                result = orthogonalize(columns, self._num_steps, group)
                result = result if dim == -1 else result.mT
        return result * (self._extra_scale * scale_of(size[-2], size[-1], self._scale_mode))

    def _shards(self, parameter: torch.Tensor) -> tuple[dist.ProcessGroup | None, int]:
        """Ranks among which the matrix is divided, and along which dimension: -2 or -1."""
        marks = vars(parameter)  # Megatron sets them on divided weights only
        dim: int = marks.get("partition_dim", -1)
        group = self._groups.expt_tp if marks.get("expert_tp") else self._groups.tp
        is_divided = marks.get("tensor_model_parallel") and dim >= 0 and group.size() > 1
        return (group, dim - 2) if is_divided and self._mode != "blockwise" else (None, -1)


def build_muon(config: OptimizerConfig, chunks: list[Any], settings: MuonArgs, *, is_layer_wise: bool) -> Any:
    """Megatron's Muon optimizer for ``chunks`` with our class in place of one from a package that is not on PyPI.

    Args:
        config: for adam's parameters. ``use_distributed_optimizer`` is off.
        is_layer_wise: every data-parallel rank has the states of some matrices only (dist_muon).

    Raises:
        ConfigError: a rank has no matrix for Muon to train. Raised on all ranks.
    """
    _check_matrices(chunks, is_layer_wise=is_layer_wise)
    vars(config).update(vars(settings))  # Megatron's fields have the names of the flags
    with _our_muon(has_output_gate=chunks[0].config.attention_output_gate):
        optimizer = muon_module.get_megatron_muon_optimizer(
            config, chunks, use_gloo_process_groups=False, layer_wise_distributed_optimizer=is_layer_wise
        )
    # adapters are matrices only, and Megatron cannot save an Adam that has no parameters
    optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    for chunk in chunks:
        for parameter in chunk.parameters():
            marks = vars(parameter)
            if (main := marks.get("main_param")) is not None:
                # Megatron marks the 16-bit weights, but the optimizer gets their fp32 copies.
                vars(main).update({mark: marks[mark] for mark in _MARKS if mark in marks})
    if is_layer_wise and dist.get_backend() == "gloo":  # it cannot gather tensors of different sizes
        optimizer.allgather_params = optimizer.broadcast_params
    return optimizer


def _check_matrices(chunks: list[Any], *, is_layer_wise: bool) -> None:
    """Raise on all ranks if one has no matrix: Megatron makes the optimizer on every rank, and torch refuses."""
    matrices = [
        parameter
        for chunk in chunks
        for parameter in chunk.parameters()
        if parameter.requires_grad
        and parameter.dim() == 2
        and not vars(parameter).get("is_embedding_or_output_parameter")
        and (is_layer_wise or vars(parameter).get("allreduce", True))  # divided experts have another optimizer
    ]
    problem = (
        f"--optimizer {'dist_muon' if is_layer_wise else 'muon'} needs a weight of a linear layer to train on every "
        "pipeline stage, and finds none: use --optimizer adam, or let --only-train-params-name-list or "
        "--freeze-params-name-list leave one."
    )
    raise_everywhere([] if matrices else [problem])


@contextlib.contextmanager
def _our_muon(*, has_output_gate: bool) -> Iterator[None]:
    theirs = muon_module.HAVE_EMERGING_OPTIMIZERS, muon_module.TensorParallelMuon
    ours = partial(Muon, has_output_gate=has_output_gate)
    muon_module.HAVE_EMERGING_OPTIMIZERS, muon_module.TensorParallelMuon = True, ours
    try:
        yield
    finally:
        muon_module.HAVE_EMERGING_OPTIMIZERS, muon_module.TensorParallelMuon = theirs


def _gathered(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


@contextlib.contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
