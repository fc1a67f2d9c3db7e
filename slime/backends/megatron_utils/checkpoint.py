"""Saving and loading a training state in Megatron's distributed checkpoint layout.

    <save>/iter_0000012/                       shards, .metadata, metadata.json, common.pt
    <save>/latest_checkpointed_iteration.txt   "12": written last, so that what it names is complete

The iteration is the rollout id. Called by ``actor``, on all ranks at once.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from torch.distributed.checkpoint.api import CheckpointException

from slime.backends.megatron_utils.checkpoint_source import TRACKER, Source, iteration_directory
from slime.backends.megatron_utils.model import unwrap
from slime.backends.megatron_utils.model_shape import ModelShape
from slime.backends.megatron_utils.step import TrainState
from slime.utils.errors import ConfigError

__all__ = ["CheckpointContent", "load_model_weights", "load_training_state", "save_checkpoint"]

_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",  # loads at any parallel size; Megatron's default does not work
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
_PLAIN = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class CheckpointContent:
    """What besides the weights is saved or loaded."""

    has_optimizer: bool = True
    has_rng: bool = True


def save_checkpoint(
    state: TrainState, shape: ModelShape, args: Namespace, root: str, iteration: int, content: CheckpointContent
) -> None:
    """Write ``iteration``; it is complete and named by the tracker file when this returns on all ranks."""
    final = iteration_directory(root, iteration)
    partial = final.with_name(f".{final.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state_dict = _sharded_state(state, content, is_loading=False)
    state_dict |= {
        "args": Namespace(**{name: value for name, value in vars(args).items() if isinstance(value, _PLAIN)}),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "model_shape": dataclasses.asdict(shape),
    }
    if content.has_optimizer:
        state_dict["opt_param_scheduler"] = state.scheduler.state_dict()
    dist_checkpointing.save(
        state_dict,
        str(partial),
        get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1),
        content_metadata=_SHARDING,
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _write_tracker(Path(root), iteration)
    dist.barrier()


def load_training_state(state: TrainState, shape: ModelShape, source: Source, content: CheckpointContent) -> None:
    """Continue where the checkpoint stopped: weights, optimizer, schedule, random number generators."""
    state_dict = _load(source, shape, _sharded_state(state, content, is_loading=True))
    unwrap(state.model).load_state_dict(state_dict["model"])
    if content.has_optimizer:
        state.optimizer.load_state_dict(state_dict["optimizer"])
        state.scheduler.load_state_dict(state_dict["opt_param_scheduler"])
    else:
        state.optimizer.reload_model_params()
    if content.has_rng:
        _set_rng_state(state_dict["rng_state"])


def load_model_weights(model: Any, shape: ModelShape, source: Source) -> None:
    """Weights only, into the live model; the optimizer's copies are not touched."""
    state_dict = _load(source, shape, {"model": unwrap(model).sharded_state_dict(metadata=_metadata())})
    unwrap(model).load_state_dict(state_dict["model"])


def _metadata() -> dict[str, Any]:
    return {**_SHARDING, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def _sharded_state(state: TrainState, content: CheckpointContent, *, is_loading: bool) -> dict[str, Any]:
    model = unwrap(state.model).sharded_state_dict(metadata=_metadata())
    sharded: dict[str, Any] = {"model": model}
    if content.has_optimizer:
        sharded["optimizer"] = state.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_metadata())
    if content.has_rng:
        sharded["rng_state"] = _rng_state()
    return sharded


def _load(source: Source, shape: ModelShape, sharded: dict[str, Any]) -> dict[str, Any]:
    where = f"{source.flag} {source.directory}"
    try:
        common = dist_checkpointing.load_common_state_dict(source.directory)
        problems = _shape_differences(common.get("model_shape"), shape, where)
        if problems:
            raise ConfigError(problems)
        return dist_checkpointing.load(sharded, source.directory, get_default_load_sharded_strategy(source.directory))
    except CheckpointException as error:  # a BaseException: "except Exception" lets it kill the process without a word
        causes = "; ".join(sorted({str(cause) for cause in error.failures.values()}))
        raise ConfigError(f"{where} does not fit the model and optimizer of this run: {causes}") from error
    except (OSError, KeyError, RuntimeError, ValueError, dist_checkpointing.core.CheckpointingException) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error


def _shape_differences(saved: dict[str, Any] | None, shape: ModelShape, where: str) -> list[str]:
    current = dataclasses.asdict(shape)
    return [
        f"{where} was saved with {name} {value}, but --hf-checkpoint describes a model with {name} {current[name]}."
        for name, value in (saved or {}).items()
        if name in current and current[name] != value
    ]


def _write_tracker(root: Path, iteration: int) -> None:
    temporary = root / f".{TRACKER}.partial"
    temporary.write_text(str(iteration), encoding="utf-8")
    temporary.replace(root / TRACKER)


def _rng_state() -> ShardedObject:
    """One state per model-parallel position; data-parallel ranks share it, as they share the seed."""
    position = (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank())
    size = (mpu.get_pipeline_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size())
    numpy_kind, numpy_keys, *numpy_rest = np.random.get_state(legacy=True)
    state = {
        "random": random.getstate(),
        "numpy": (numpy_kind, torch.from_numpy(numpy_keys.astype(np.int64)), *numpy_rest),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    replica = mpu.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [state], size, position, replica_id=replica)


def _set_rng_state(loaded: list[dict[str, Any]]) -> None:
    state = loaded[0]
    random.setstate(state["random"])
    numpy_kind, numpy_keys, *numpy_rest = state["numpy"]
    np.random.set_state((numpy_kind, numpy_keys.numpy().astype(np.uint32), *numpy_rest))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
