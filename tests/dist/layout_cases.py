"""Functions that the ranks run in the tests of parallel layouts: train on a part of a rollout, return every result."""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.experts import megatrons_layer
from slime.algorithms.arguments import needs_reference
from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.utils.errors import SlimeError
from tests.unit.megatron_utils.fake_deep_gemm import make_package
from tests.unit.megatron_utils.tiny_trainer import make_args, split_batch, weights_of


def train(
    rank: int, world_size: int, hf: str, batch: dict[str, Any], num_steps: int, args: dict[str, Any], size: int = 3
) -> dict[str, Any]:
    """Train on one rollout of ``num_steps`` steps.

    Returns:
        log_probs: before training, by position in the whole batch.
        columns: the rank's after training.
        gradients, weights: of the first step, after the last. Both whole, under Hugging Face names.
        num_states: weights whose optimizer states this rank has.
    """
    torch.use_deterministic_algorithms(True)
    settings = make_args(hf, **args)
    trainer = MegatronTrainer(settings, rank=rank, world_size=world_size, with_ref=needs_reference(settings))
    assert trainer.setup() == 0
    dp_rank, dp_size = trainer.data_parallel
    part = split_batch(batch, dp_rank, dp_size, num_steps, size=size)
    gradients = _keep_gradients(trainer)
    batches = _keep_batches()
    report = trainer.train(0, part)
    names = ("log_probs", "ref_log_probs", "advantages")
    columns = batches[-1].columns
    return {
        "dp_rank": dp_rank,
        "positions": part["partition"],
        "log_probs": dict(zip(part["partition"], columns["log_probs"], strict=True)),
        "columns": {name: columns[name] for name in names if name in columns},
        "report": report,
        "gradients": gradients[0] if gradients else {},
        "num_states": _num_states(trainer),
        "weights": weights_of(trainer),
    }


def train_with_deep_gemm(rank: int, world_size: int, **case: Any) -> dict[str, Any]:
    """:func:`train` with a fake of the package."""
    package = sys.modules["deep_gemm"] = make_package()
    result = train(rank, world_size, **case)
    assert package.calls
    return result


def _keep_batches() -> list[Any]:
    """Every batch that is made from now on. The trainer adds columns to its copy."""
    from slime.backends.megatron_utils import actor

    kept: list[Any] = []

    class KeptBatch(actor.TrainBatch):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            kept.append(self)

    actor.TrainBatch = KeptBatch  # type: ignore[misc]
    return kept


def _keep_gradients(trainer: MegatronTrainer) -> list[dict[str, torch.Tensor]]:
    """Gradients as the optimizer gets them, gathered in the same way as the weights. Not when they are sharded."""
    state = trainer._ready
    kept: list[dict[str, torch.Tensor]] = []
    if any(type(part).__name__ == "DistributedOptimizer" for part in _parts(state.optimizer)):
        return kept
    original = state.optimizer.step

    def step() -> Any:
        parameters = [parameter for chunk in state.chunks for parameter in chunk.parameters()]
        weights = [parameter.data for parameter in parameters]
        for parameter in parameters:
            is_frozen = not parameter.requires_grad
            parameter.data = torch.zeros_like(parameter) if is_frozen else parameter.main_grad.to(parameter.dtype)
        kept.append(weights_of(trainer))
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight
        return original()

    state.optimizer.step = step
    return kept


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _num_states(trainer: MegatronTrainer) -> int:
    inner = [part.optimizer for part in _parts(trainer._ready.optimizer) if part.optimizer is not None]
    return sum(weight.numel() for each in inner for group in each.param_groups for weight in group["params"])


def head_rows(rank: int, world_size: int, hf: str, batch: dict[str, Any], args: dict[str, Any]) -> tuple[int, int]:
    """Rows that went through this rank's LM head in a pass for log-probs, and rows that went through its layers."""
    trainer = MegatronTrainer(make_args(hf, **args), rank=rank, world_size=world_size, with_ref=False)
    trainer.setup()
    dp_rank, dp_size = trainer.data_parallel
    model = trainer._ready.chunks[0]
    while hasattr(model, "module"):
        model = model.module
    counts = [0, 0]

    def count(slot: int) -> Any:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            rows = inputs[0] if inputs else output[0]
            counts[slot] += rows.size(0)

        return hook

    if model.post_process:
        model.output_layer.register_forward_hook(count(0))
    model.decoder.layers[0].register_forward_hook(count(1))
    trainer._log_probs(trainer._train_batch(split_batch(batch, dp_rank, dp_size)))
    return counts[0], counts[1]


def experts_beside_megatrons(rank: int, world_size: int, hf: str, args: dict[str, Any]) -> dict[str, Any]:
    """A trainer's layer of experts and Megatron's, with the same weights.

    Returns:
        reads: of a tensor's values by the host in our forward pass, and in our backward pass.
        values: pairs (Megatron's, ours) of output and gradients, by name.
        places: pairs of the tensors of a checkpoint.
    """
    from slime.backends.megatron_utils.model.experts import GroupedExperts, experts_of

    trainer = MegatronTrainer(make_args(hf, **args), rank=rank, world_size=world_size, with_ref=False)
    trainer.setup()
    modules = [module for chunk in trainer._ready.chunks for module in chunk.modules()]
    ours = next(module for module in modules if isinstance(getattr(module, "experts", None), GroupedExperts))
    counts, values = [0], []
    stock = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        counts[-1] += 1
        return stock(tensor)

    torch.Tensor.tolist = counted  # type: ignore[method-assign]
    for layer in (megatrons_layer(ours), ours):
        tokens = torch.randn(8, 1, layer.config.hidden_size, generator=torch.Generator().manual_seed(rank))
        tokens.requires_grad_()
        counts.append(0)
        out, _ = layer(tokens)
        counts.append(0)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        found = {"output": out.detach(), "tokens": tokens.grad}
        for name, parameter in layer.named_parameters("mlp"):
            marks = vars(parameter)
            gradient = marks.get("main_grad", parameter.grad)  # of a trainer's parameter, in the buffer
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            found |= dict(experts_of(name, gradient, marks.get("num_experts")))
        values.append(found)
    torch.Tensor.tolist = stock  # type: ignore[method-assign]
    return {"reads": tuple(counts[-2:]), "values": values, "places": list(map(_places, (megatrons_layer(ours), ours)))}


def _places(layer: Any) -> dict[Any, torch.Tensor]:
    """The tensors of a checkpoint by key, place and replica."""
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    state = layer.sharded_state_dict("mlp.", (), metadata)
    apply_factories(state)
    tensors = [one for one in nested_values(state) if isinstance(one, ShardedTensor)]
    return {(one.key, one.global_offset, one.global_shape, one.replica_id): one.data for one in tensors}


def poisoned(
    rank: int, world_size: int, hf: str, batch: dict[str, Any], args: dict[str, Any], poison: dict[str, int]
) -> dict[str, Any]:
    """Train with a NaN in a reward of one data-parallel rank, or in a weight of one rank.

    Returns the error of this rank and whether its weights are unchanged.
    """
    settings = make_args(hf, **args)
    trainer = MegatronTrainer(settings, rank=rank, world_size=world_size, with_ref=False)
    trainer.setup()
    dp_rank, dp_size = trainer.data_parallel
    part = split_batch(batch, dp_rank, dp_size)
    if poison.get("dp_rank") == dp_rank:
        part["rewards"][0] = float("nan")
    if poison.get("rank") == rank:
        last = list(trainer._ready.chunks[-1].parameters())[-1]
        last.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    before = [parameter.clone() for chunk in trainer._ready.chunks for parameter in chunk.parameters()]
    error = None
    grad_norm = None
    try:
        report = trainer.train(3, part)
        grad_norm = report.steps[0]["grad_norm"] if report.steps else None
    except SlimeError as raised:
        error = str(raised)
    after = [parameter for chunk in trainer._ready.chunks for parameter in chunk.parameters()]
    is_same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {"error": error, "grad_norm": grad_norm, "is_same": is_same}


def train_critic(
    rank: int, world_size: int, hf: str, batch: dict[str, Any], num_steps: int, args: dict[str, Any], size: int = 3
) -> dict[str, Any]:
    """Train a critic on the same rollout twice. The second values show the effect of the first update."""
    from slime.backends.megatron_utils.actor import MegatronCritic

    torch.use_deterministic_algorithms(True)
    critic = MegatronCritic(make_args(hf, **args), rank=rank, world_size=world_size)
    critic.setup()
    dp_rank, dp_size = critic.data_parallel
    part = split_batch(batch, dp_rank, dp_size, num_steps, size=size)
    reports, values = zip(*(critic.train_values(rollout_id, part) for rollout_id in range(2)), strict=True)
    return {
        "dp_rank": dp_rank,
        "steps": [step for report in reports for step in report.steps],
        "values": [dict(zip(part["partition"], one, strict=True)) for one in values],
    }
