"""The training state, and its form as Megatron's distributed checkpoint: content, and reading on any parallel layout.

``writer`` saves the content of :func:`sharded_state`. ``checkpoint_files`` handles the files around it. The iteration
is the rollout id. ``actor`` calls every function on all ranks at once.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8
from torch.distributed.checkpoint.api import CheckpointException

from slime.backends.megatron_utils.checkpoint.shard_files import LocalReader
from slime.backends.megatron_utils.checkpoint.tensors import chunks_of
from slime.backends.megatron_utils.model.lora import sharded_adapters
from slime.backends.training.checkpoint_source import DAMAGE, Source, unfit, unreadable
from slime.backends.training.context_parallel import Sharding
from slime.backends.training.hf_files import raise_everywhere
from slime.backends.training.pieces import generator_states, set_generators
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

# of the files: loads at any parallel size, unlike Megatron's default
_FORMAT = "fully_reshardable"
SHARDING = {
    "distrib_optim_sharding_type": _FORMAT,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}

_TYPE = "param_state_sharding_type"
_IN_BUCKETS = "dp_reshardable"

_EXTRA_STATE = re.compile(r"\._extra_state\d*$")
"""Names of FP8 scales. Only Transformer Engine's modules have them."""

_SETTINGS = {"betas", "eps", "momentum"}
"""Of a group of the optimizer, from the command line."""

_DAMAGED = (*DAMAGE, dist_checkpointing.core.CheckpointingException)


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The live model, its Megatron config, optimizer and schedule.

    Attributes:
        chunks: this rank's part of the model, data-parallel wrapped: one, or one per virtual pipeline stage.
        sharding: how the samples of a data-parallel rank are divided among the ranks that share them.
        trains_prediction: multi-token-prediction layers learn as well.
        adapter: description of the adapters (``describe_adapter``) if only they are trained. Checkpoints then have no
            other weights.
    """

    chunks: list[Any]
    config: Any
    optimizer: Any
    scheduler: Any
    sharding: Sharding = dataclasses.field(default_factory=Sharding)
    trains_prediction: bool = False
    adapter: dict[str, Any] | None = None

    @property
    def model(self) -> Any:
        """The only chunk, or the list of them: what checkpoints and conversion take."""
        return self.chunks[0] if len(self.chunks) == 1 else self.chunks


@dataclasses.dataclass(frozen=True)
class CheckpointContent:
    """The content besides the weights."""

    has_optimizer: bool = True
    has_rng: bool = True


def sharded_state(
    state: TrainState, content: CheckpointContent, *, is_loading: bool, sharding: str = _FORMAT
) -> dict[str, Any]:
    """Weights, or adapters, and optionally optimizer and random number generators, as Megatron saves and loads them.

    Args:
        sharding: of the optimizer's states in the files.
    """
    sharded = _sharded_model(state.model, adapters_only=state.adapter is not None)
    if content.has_optimizer:
        # ``shard_files.sliced_states``, which writes the format of the files without gathering
        slices = sharding if sharding == _IN_BUCKETS else "fully_sharded_model_space"
        metadata = _metadata() | {"distrib_optim_sharding_type": slices}
        optimizer = state.optimizer.sharded_state_dict(dict(sharded), is_loading=is_loading, metadata=metadata)
        for part in _sliced_parts(optimizer):
            part[_TYPE] = sharding if sharding == _IN_BUCKETS else _FORMAT
        sharded["optimizer"] = optimizer
    if content.has_rng:
        sharded["rng_state"] = _rng_state()
    if is_loading:  # ``shard_files`` converts one tensor after the other when it writes
        force_all_tensors_to_non_fp8(sharded)  # a checkpoint has the same dtypes with and without FP8 weights
    return sharded


def load_training_state(state: TrainState, shape: ModelShape, source: Source, content: CheckpointContent) -> None:
    """Load weights, optimizer, schedule and random number generators, to continue the run.

    Raises:
        ConfigError: the checkpoint is damaged, of another model, or lacks what ``content`` asks for.
    """
    sharding = _saved_sharding(source)
    sharded = sharded_state(state, content, is_loading=True, sharding=sharding)
    if content.has_rng and _is_of_another_layout(sharded["rng_state"], source):
        del sharded["rng_state"]
        content = dataclasses.replace(content, has_rng=False)
        logger.warning(
            "%s was saved on another tensor- or pipeline-parallel layout: random number generators start from --seed.",
            source.directory,
        )
    try:
        loaded = _load(source, shape, sharded)
    except ConfigError as error:
        if content.has_optimizer and sharding != _FORMAT:
            raise ConfigError([*error.problems, _in_another_format(source, sharding)]) from None
        raise
    _fill_model(state.model, loaded, strict=state.adapter is None)
    if content.has_optimizer:
        given = [{name: group[name] for name in _SETTINGS & group.keys()} for group in state.optimizer.param_groups]
        _fill_optimizer(state.optimizer, loaded["optimizer"], source)
        for group, settings in zip(state.optimizer.param_groups, given, strict=True):
            group.update(settings)
        if not state.scheduler.use_checkpoint_opt_param_scheduler:
            # Megatron has both rates in the groups of the optimizer too. There they would beat the command line.
            for group in state.optimizer.param_groups:
                group["max_lr"], group["min_lr"] = state.scheduler.max_lr, state.scheduler.min_lr
        state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    else:
        # Else the first step would overwrite the loaded weights by old main weights.
        state.optimizer.reload_model_params()
    if content.has_rng:
        _set_rng_state(loaded["rng_state"])


def load_model_weights(model: Any, shape: ModelShape, source: Source, *, optional: Collection[str] = ()) -> list[str]:
    """Load weights only, of a model with adapters those of the adapters. The optimizer's copies do not change.

    Args:
        optional: parameters that may be absent from the checkpoint or have another shape (a critic's head).

    Returns:
        The optional parameters that were not loaded.

    Raises:
        ConfigError: the checkpoint is damaged or of another model.
    """
    adapters_only = any(rule.is_adapter for rule in shape.family.rules)
    sharded = _sharded_model(model, adapters_only=adapters_only)
    left = _drop_absent(sharded, source, optional) if optional else []
    _fill_model(model, _load(source, shape, sharded), strict=not left and not adapters_only)
    return left


def describe_shape(shape: ModelShape) -> dict[str, Any]:
    """The fields of ``shape`` as plain values, to be saved and compared."""
    # Tuples become lists, as in a saved checkpoint.
    return {name: json.loads(json.dumps(value, default=str)) for name, value in shape.as_dict().items()}


def _metadata() -> dict[str, Any]:
    return {**SHARDING, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def _keys(model: Any) -> list[tuple[str, Any]]:
    """Megatron's names of the chunks inside a state dict. They are local: the tensors' own keys do not contain them."""
    chunks = chunks_of(model)
    return [("model", chunks[0])] if len(chunks) == 1 else [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _sharded_model(model: Any, *, adapters_only: bool = False) -> dict[str, Any]:
    if adapters_only:
        return {key: sharded_adapters(chunk) for key, chunk in _keys(model)}
    sharded = {key: chunk.sharded_state_dict(metadata=_metadata()) for key, chunk in _keys(model)}
    if not chunks_of(model)[0].config.fp8:
        for tensors in sharded.values():
            _drop(tensors, [name for name in tensors if _EXTRA_STATE.search(name)])  # they are empty
    return sharded


def _drop(tensors: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        del tensors[name]


def _drop_absent_scales(sharded: dict[str, Any], source: Source) -> None:
    """Leave out the FP8 scales that the checkpoint lacks: it was written without FP8, or by other modules."""
    for key, tensors in sharded.items():
        names = [name for name in tensors if _EXTRA_STATE.search(str(name))] if key.startswith("model") else []
        if names:
            saved = {entry.key for entry in load_sharded_metadata(source.directory).values()}
            _drop(tensors, [name for name in names if tensors[name].key not in saved])


def _fill_model(model: Any, loaded: dict[str, Any], *, strict: bool = True) -> None:
    for key, chunk in _keys(model):
        result = chunk.load_state_dict(loaded[key], strict=False)
        others = [name for name in (*result.missing_keys, *result.unexpected_keys) if not _EXTRA_STATE.search(name)]
        if strict and others:
            raise RuntimeError(f"the checkpoint and the model differ in {', '.join(others)}")


def _sliced_parts(optimizer_state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The states of sharded optimizers: the whole, or one per optimizer that Megatron has chained."""
    parts = [optimizer_state] if _TYPE in optimizer_state else optimizer_state.values()
    yield from (part for part in parts if isinstance(part, dict) and _TYPE in part)


def _saved_sharding(source: Source) -> str:
    """How Megatron divided the optimizer's states: its default is in buckets of the data-parallel group."""
    try:
        saved = dist_checkpointing.load_common_state_dict(source.directory).get("optimizer", {})
    except _DAMAGED:  # loading reports the damage
        return _FORMAT
    return next((part[_TYPE] for part in _sliced_parts(saved)), _FORMAT)


def _in_another_format(source: Source, sharding: str) -> str:
    layout = "the tensor-, pipeline- and expert-parallel layout they were saved on"
    fits = f"only {layout}" if sharding == _IN_BUCKETS else "the version of Megatron that saved them"
    return (
        f"{source.flag} {source.directory}: the states of its optimizer have Megatron's format {sharding}, and fit "
        f"{fits}. Save them with --dist-ckpt-optim-fully-reshardable, or load the weights alone (--no-load-optim)."
    )


def _fill_optimizer(optimizer: Any, loaded: Any, source: Source) -> None:
    for part in _sliced_parts(loaded):
        if part[_TYPE] == _FORMAT:
            part.pop("param_state", None)  # is loaded in place
    try:
        optimizer.load_state_dict(loaded)
    except KeyError as error:  # Megatron has a second optimizer for divided experts
        raise ConfigError(
            f"{source.flag} {source.directory}: its optimizer does not fit this run (no {error}): it was saved with "
            "expert parallelism and this run has none, or the other way round. --no-load-optim takes the weights alone."
        ) from error


def _drop_absent(sharded: dict[str, Any], source: Source, optional: Collection[str]) -> list[str]:
    try:
        saved = dist_checkpointing.load_tensors_metadata(source.directory)
    except _DAMAGED as error:
        raise unreadable(source, error) from None
    left: list[str] = []
    for tensors in sharded.values():
        for name in [name for name in tensors if name in optional]:
            tensor = tensors[name]
            assert isinstance(tensor, ShardedTensor), f"{name} is not a plain tensor"
            if tensor.key not in saved or saved[tensor.key].global_shape != tensor.global_shape:
                del tensors[name]
                left.append(name)
    return left


def _is_of_another_layout(state: ShardedObject, source: Source) -> bool:
    """Whether the generators' states belong to positions of another layout, and so cannot be continued."""
    try:
        saved = load_sharded_metadata(source.directory)
    except _DAMAGED:  # loading reports the damage
        return False
    shapes = {entry.global_shape for entry in saved.values() if entry.key == state.key}
    return bool(shapes) and tuple(state.global_shape) not in {tuple(shape) for shape in shapes}


def _load(source: Source, shape: ModelShape, sharded: dict[str, Any]) -> dict[str, Any]:
    """Read this rank's parts. Raises on all ranks if one of them fails."""
    loaded: dict[str, Any] = {}
    failure: BaseException | None = None
    try:
        common = dist_checkpointing.load_common_state_dict(source.directory)
        problems = _shape_differences(common.get("model_shape"), shape, f"{source.flag} {source.directory}")
        if problems:
            raise ConfigError(problems)
        _drop_absent_scales(sharded, source)
        # no exchange between ranks: the files were checked when they were written
        loaded = dist_checkpointing.load(sharded, source.directory, LocalReader(), validate_access_integrity=False)
    except CheckpointException as error:
        # A BaseException: "except Exception" would miss it, and the process would end without a message.
        failure = unfit(source, error)
    except _DAMAGED as error:
        # Subclasses of the caught errors that do not mean damage.
        is_of_machine = isinstance(error, ConfigError | torch.OutOfMemoryError | torch.distributed.DistError)
        failure = error if is_of_machine else unreadable(source, error)
    try:
        raise_everywhere(
            [] if failure is None else failure.problems if isinstance(failure, ConfigError) else [repr(failure)]
        )
    except ConfigError:
        if failure is None or isinstance(failure, ConfigError):
            raise
        raise failure from None
    return loaded


def _shape_differences(saved: dict[str, Any] | None, shape: ModelShape, where: str) -> list[str]:
    current = describe_shape(shape)
    if saved is not None and bool(saved.get("vision")) != bool(current["vision"]):
        has, builds, fix = ("a", "builds none", "give") if saved.get("vision") else ("no", "builds one", "drop")
        return [f"{where} has {has} vision tower, but this run {builds}: {fix} --multimodal-keys."]
    return [
        f"{where} was saved with {name} {value}, but --hf-checkpoint describes a model with {name} {current[name]}."
        for name, value in (saved or {}).items()
        if name in current and current[name] != value  # an older version may have saved other fields
    ]


def _rng_state() -> ShardedObject:
    """One state per model-parallel position. Data-parallel ranks share it, as they share the seed."""
    position = (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank())
    size = (mpu.get_pipeline_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size())
    state = generator_states() | {"tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    replica = mpu.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [state], size, position, replica_id=replica)


def _set_rng_state(loaded: list[dict[str, Any]]) -> None:
    set_generators(loaded[0])
    tensor_parallel.get_cuda_rng_tracker().set_states(loaded[0]["tracker"])
