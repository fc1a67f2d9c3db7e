"""AdamW or SGD on the shards, with Megatron's rules: norms and biases are not decayed. Called by ``actor``."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from slime.backends.training.arguments import OptimizerArgs
from slime.backends.training.optimizer import StatelessAdam, fuse_adamw


def build_optimizer(
    model: PreTrainedModel, args: OptimizerArgs, *, is_stateless: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of a sharded model. Its states are sharded like the weights.

    Args:
        is_stateless: Adam without moments (--use-stateless-adam).
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    plain = [one for name, one in trained if name.endswith(".bias") or one.dim() == 1]
    decayed = [one for name, one in trained if not (name.endswith(".bias") or one.dim() == 1)]
    groups = [{"params": decayed, "decay_factor": 1.0}, {"params": plain, "decay_factor": 0.0}]
    groups = [group for group in groups if group["params"]]
    betas = (args.adam_beta1, args.adam_beta2)
    if is_stateless:
        return StatelessAdam(groups, args.lr, betas, args.adam_eps, args.weight_decay)
    match args.optimizer:
        case "adam":
            adamw = torch.optim.AdamW(groups, args.lr, betas, args.adam_eps, args.weight_decay)
            fuse_adamw(adamw)
            return adamw
        case "sgd":
            return torch.optim.SGD(groups, args.lr, args.sgd_momentum, weight_decay=args.weight_decay)
        case other:
            raise ValueError(f"--optimizer {other} is not supported")


@torch.no_grad()
def allocate_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states of an optimizer before its first step, as the target of loading a checkpoint."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state or isinstance(optimizer, StatelessAdam):
                continue
            match optimizer:
                case torch.optim.AdamW():
                    state["step"] = torch.zeros((), dtype=torch.float32)  # on the host, as AdamW itself makes it
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                case torch.optim.SGD() if group["momentum"] != 0:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


@torch.no_grad()
def reset_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zero Adam's moments and step counts, and the momentum of sgd (--reset-optimizer-states)."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
