"""Megatron's optimizer and its schedule of learning rate and weight decay. Called by ``setup``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from megatron.core import optimizer as optimizer_module
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.backends.megatron_utils.arguments import MuonArgs
from slime.backends.megatron_utils.host_adam import HostUpdate, keep_states_on_host, update_threads
from slime.backends.megatron_utils.muon import build_muon
from slime.backends.training.arguments import OptimizerArgs, PrecisionArgs
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
