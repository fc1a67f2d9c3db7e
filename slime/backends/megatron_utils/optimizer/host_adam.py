"""AdamW whose main weights and moments are in host memory, for a share of the weights (--optimizer-cpu-offload).

    device                        host
    gradient (fp32 buffer)  --->  staging buffer -> AdamW on main weight and moments
    model weight (16 bit)   <---  main weight

The device keeps 2 bytes of weight and 4 of gradient per parameter, and 12 bytes go to the host. The other share has the
same update with its 12 bytes on the device. On a CPU host and device are one memory and nothing is copied.

How it fits into Megatron's sharded optimizer: that has a mode for optimizers that own their main weights
("precision-aware"). There it hands over shards of the model's weights with ``decoupled_grad``, and leaves main weights
and the copy back to us. Called by ``optimizer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.optim.adamw import adamw

_STATES = ("master_param", "exp_avg", "exp_avg_sq")
_HOST = torch.device("cpu")


class HostAdam(torch.optim.Optimizer):
    """See the module docstring.

    Args:
        groups: of Megatron's Adam, with its settings: shards of the model's weights, flat, views of its buffers.
        fraction: share of the numbers with states on the host: the first shards, each as a whole.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, fraction: float) -> None:
        super().__init__([torch.empty(0)], {})  # torch refuses an empty list
        self.param_groups = list(groups)  # the same objects: Megatron and the schedule keep references to them
        shards = [shard for group in self.param_groups for shard in group["params"]]
        budget = fraction * sum(shard.numel() for shard in shards)
        longest = 0
        for shard in shards:
            is_host = budget > 0
            budget -= shard.numel()
            self.state[shard] = _first_state(shard, _HOST if is_host else shard.device)
            if is_host and shard.device != _HOST:
                longest = max(longest, shard.numel())
        # One buffer for all shards: updates run one after the other.
        self._staging = torch.empty(longest, dtype=torch.float32, pin_memory=_is_pinned(shards))

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Main weights and moments on the model's device."""
        for shard, state in self.state.items():
            yield from (state[name] for name in _STATES if state[name].device == shard.device)

    @torch.no_grad()
    def read_weights(self) -> None:
        """Start the main weights from the model's weights, which were filled from elsewhere."""
        for shard, state in self.state.items():
            state["master_param"].copy_(shard)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply ``decoupled_grad``: decoupled weight decay, then Adam (Loshchilov and Hutter 2019, algorithm 2)."""
        assert closure is None, "Megatron gives none"
        for group in self.param_groups:
            for shard in group["params"]:
                gradient = vars(shard).get("decoupled_grad")  # set by Megatron in its precision-aware mode
                if gradient is not None:
                    self._update(shard, gradient, group)
            group["step"] = group.get("step", 0) + 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. They are views of a buffer that belongs to Megatron."""
        for group in self.param_groups:
            for shard in group["params"]:
                shard.decoupled_grad = None

    def _update(self, shard: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[shard]
        master = state["master_param"]
        if master.device != gradient.device:
            gradient = self._staging[: gradient.numel()].copy_(gradient)
        beta1, beta2 = group["betas"]
        adamw(
            [master],
            [gradient.float()],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            foreach=False,
            fused=master.device == _HOST,  # one pass over memory instead of ten
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        shard.copy_(master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups' settings and the step. Megatron copies the tensors itself."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
            for shard in group["params"]:
                self.state[shard]["step"].fill_(float(group.get("step") or 0))


@torch.no_grad()
def _first_state(shard: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    is_pinned = device == _HOST and _is_pinned([shard])
    state = {
        name: torch.zeros(shard.shape, dtype=torch.float32, device=device, pin_memory=is_pinned) for name in _STATES
    }
    state["master_param"].copy_(shard)
    return state | {"step": torch.zeros((), dtype=torch.float32)}


def _is_pinned(shards: list[torch.Tensor]) -> bool:
    """Whether to pin host memory, so that a GPU copies at full speed. Impossible without a GPU."""
    return any(shard.is_cuda for shard in shards)


class _HostDistributedOptimizer(DistributedOptimizer):
    """Megatron's sharded optimizer around :class:`HostAdam`: where its tensors are found, for checkpoints."""

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        main, *moments = (self._states_of(model_param)[name] for name in _STATES)
        return {"param": main, **dict(zip(_STATES[1:], moments, strict=True))}

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        for name, target in self._get_main_param_and_optimizer_states(model_param).items():
            target.copy_(tensors[name])

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        self.optimizer.read_weights()

    def _states_of(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        group, index = self.model_param_group_index_map[model_param]
        states: dict[str, torch.Tensor] = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        return states


def keep_states_on_host(part: Any, fraction: float) -> None:
    """Let ``part``, a sharded optimizer in precision-aware mode, step with :class:`HostAdam`."""
    if part.optimizer is None:  # nothing to train on this rank
        return
    part.optimizer = HostAdam(part.optimizer.param_groups, fraction=fraction)
    part.__class__ = _HostDistributedOptimizer  # Megatron built it: only the access to its tensors changes
