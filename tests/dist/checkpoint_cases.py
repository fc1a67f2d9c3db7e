"""Functions that a rank runs in the tests of checkpoints across layouts: train, save, load, train on."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.utils.errors import ConfigError, SlimeError
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, split_batch, weights_of


def run(
    rank: int,
    world_size: int,
    hf: str,
    args: dict[str, Any],
    rollouts: list[int],
    save_after: list[int],
    full_disk_on: int | None = None,
    full_for: str = "shards",
) -> dict[str, Any]:
    """Train on ``rollouts`` and save after some of them.

    Returns:
        start: the first rollout id.
        weights_at_start, weights: whole, under Hugging Face names.
        error: of the set-up or of a save. With ``full_disk_on`` this rank's disk is full for shards or the manifest.
    """
    torch.use_deterministic_algorithms(True)
    trainer = MegatronTrainer(make_args(hf, **args), rank=rank, world_size=world_size, with_ref=False)
    try:
        start = trainer.setup()
    except ConfigError as error:
        return {"error": str(error)}
    if rank == full_disk_on:
        _fill_disk(full_for)
    at_start = weights_of(trainer)
    error = ""
    for rollout_id in rollouts:
        dp_rank, dp_size = trainer.data_parallel
        trainer.train(rollout_id, split_batch(make_batch(8, seed=rollout_id), dp_rank, dp_size, size=2))
        if rollout_id in save_after:
            try:
                trainer.save(rollout_id)
            except SlimeError as caught:
                error = str(caught)
    return {"start": start, "weights_at_start": at_start, "weights": weights_of(trainer), "error": error}


class _Allocated(TorchDispatchMode):
    """Bytes of the memory that operators have made in this mode, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()
        self._lock = threading.Lock()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and _address(value) not in given:
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        with self._lock:
            if storage._cdata in self._known or storage.nbytes() == 0:
                return
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
        weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())

    def _remove(self, storage: int, num_bytes: int) -> None:
        with self._lock:
            self._known.discard(storage)
            self.now -= num_bytes


def _left(counter: _Allocated) -> int:
    """Bytes that stay. A thread of gloo releases the tensors of its last collective after the caller went on."""
    deadline = time.monotonic() + 60
    while counter.now and time.monotonic() < deadline:
        time.sleep(0.01)
    return counter.now


def _address(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


@contextmanager
def _counted() -> Iterator[_Allocated]:
    """Count the memory of all threads that start in the block, and of this one."""
    counter, run = _Allocated(), threading.Thread.run

    def run_counted(thread: threading.Thread) -> None:
        with counter:
            run(thread)

    with mock.patch.object(threading.Thread, "run", run_counted), counter:
        yield counter


@contextmanager
def _groups_used() -> Iterator[list[Any]]:
    """The process groups of all collectives in the block."""
    groups: list[Any] = []
    places = {"all_gather_object": 2, "gather_object": 3, "broadcast_object_list": 2, "all_reduce": 2, "barrier": 0}

    def watch(name: str, place: int) -> Any:
        stock = getattr(dist, name)

        def call(*args: Any, **kw: Any) -> Any:
            groups.append(kw.get("group", args[place] if len(args) > place else None))
            return stock(*args, **kw)

        return mock.patch.object(dist, name, call)

    with ExitStack() as stack:
        for name, place in places.items():
            stack.enter_context(watch(name, place))
        yield groups


def measure(rank: int, world_size: int, hf: str, args: dict[str, Any], how: str, piece_bytes: int) -> dict[str, Any]:
    """Save once, as ``how`` says: sliced, background, or gathered as older versions did.

    Returns:
        num_parameters: of the rank. extra: bytes that the save held besides the training state, at most.
        in_default_group: collectives of the save that would use a device.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from slime.backends.megatron_utils.checkpoint import shard_files

    shard_files._MAX_BYTES = piece_bytes
    args = args | {"async_save": how == "background"}
    trainer = MegatronTrainer(make_args(hf, **args), rank=rank, world_size=world_size, with_ref=False)
    trainer.setup()
    dp_rank, dp_size = trainer.data_parallel
    trainer.train(0, split_batch(make_batch(8, seed=0), dp_rank, dp_size, size=2))
    # as on a device, where ranks exchange lists in a gloo group beside the data-parallel group
    shard_files.dist.get_backend = lambda group=None: "nccl"
    trainer.save(0)  # makes the process groups
    trainer.finish_saves()
    if how == "gathered":
        DistributedOptimizer.sharded_param_state_fs_model_space = (
            DistributedOptimizer.sharded_param_state_fully_reshardable
        )
    with _counted() as counter, _groups_used() as groups:
        trainer.save(1)
        trainer.finish_saves()
    return {
        "num_parameters": sum(p.numel() for chunk in trainer._ready.chunks for p in chunk.parameters()),
        "extra": counter.most,
        "left": _left(counter),
        "in_default_group": sum(group is None or group is dist.group.WORLD for group in groups),
        "num_collectives": len(groups),
    }


def run_and_save_as_megatron(
    rank: int, world_size: int, hf: str, args: dict[str, Any], sharding: str
) -> dict[str, Any]:
    """Train on two rollouts, then save as Megatron does: the optimizer's states as ``sharding``, in its writer's files.

    Version 0.1 saved as ``fully_reshardable``, and Megatron's default is ``dp_reshardable``.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy

    from slime.backends.megatron_utils.checkpoint import state

    torch.use_deterministic_algorithms(True)
    trainer = MegatronTrainer(make_args(hf, **args), rank=rank, world_size=world_size, with_ref=False)
    trainer.setup()
    for rollout_id in (0, 1):
        dp_rank, dp_size = trainer.data_parallel
        trainer.train(rollout_id, split_batch(make_batch(8, seed=rollout_id), dp_rank, dp_size, size=2))
    ready, directory = trainer._ready, Path(args["save"]) / "iter_0000001"
    directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    metadata = {"distrib_optim_sharding_type": sharding}
    content = state._sharded_model(ready.model)
    content["optimizer"] = ready.optimizer.sharded_state_dict(dict(content), metadata=state._metadata() | metadata)
    content["rng_state"] = state._rng_state()
    content |= {"checkpoint_version": 3.0, "iteration": 1, "model_shape": state.describe_shape(trainer._shape)}
    content["opt_param_scheduler"] = ready.scheduler.state_dict()
    results: queue.Queue[Any] = queue.Queue()
    filesystem_async._results_queue = results
    strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1)
    request = dist_checkpointing.save(
        content, str(directory), strategy, content_metadata=state.SHARDING | metadata, async_sharded_save=True
    )
    written = {}
    for index, bucket in enumerate(request.async_fn_args[1] if request.async_fn_args else ()):
        done: queue.Queue[Any] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            [_no_transforms()], index, bucket, done, pending, True
        )
        _, written[index] = done.get_nowait()
    results.put(written)
    for function in request.finalize_fns:
        function()
    (Path(args["save"]) / "latest_checkpointed_iteration.txt").write_text("1")
    return {"weights": weights_of(trainer)}


def _no_transforms() -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms

    return _StorageWriterTransforms()


def load_with_a_problem(rank: int, world_size: int, hf: str, args: dict[str, Any], problem: str, on: int) -> str:
    """Start a trainer from ``hf`` while rank ``on`` has a problem with the files or its model. Returns the error."""
    from slime.backends.megatron_utils.checkpoint import hf_weights

    def fail(*_: Any) -> Any:
        raise ConfigError(f"rank {rank} cannot read a {problem}")

    if rank == on:
        hf_weights.TensorReader.get = fail if problem == "tensor" else hf_weights.TensorReader.get
        hf_weights.ModelTensors = fail if problem == "model" else hf_weights.ModelTensors
    trainer = MegatronTrainer(make_args(hf, **args), rank=rank, world_size=world_size, with_ref=False)
    try:
        trainer.setup()
    except ConfigError as error:
        return str(error)
    return ""


def export(
    rank: int,
    world_size: int,
    hf: str,
    args: dict[str, Any],
    path: str,
    num_writers: int,
    full_disk_on: int | None = None,
    is_blind: int | None = None,
    sees_no: str = "_has_token",
) -> tuple[str, list[str]]:
    """Write a Hugging Face directory in many small files.

    Args:
        full_disk_on: the rank whose second file does not fit.
        is_blind: a rank that sees another directory than rank 0.
        sees_no: the function of ``hf_files`` that finds nothing there.

    Returns:
        The error, and the names of the files that this rank wrote.
    """
    import safetensors.torch

    from slime.backends.training import hf_files

    trainer = MegatronTrainer(make_args(hf, **args), rank=rank, world_size=world_size, with_ref=False)
    trainer.setup()
    stock, names = safetensors.torch.save_file, []

    def save(tensors: Any, path: Path, metadata: Any) -> None:
        names.append(path.name)
        if rank == full_disk_on and len(names) == 2:
            raise OSError(28, "No space left on device")
        stock(tensors, path, metadata)

    safetensors.torch.save_file = save
    hf_files._MAX_WRITERS, hf_files._MAX_FILE_BYTES = num_writers, 4096
    if rank == is_blind:
        setattr(hf_files, sees_no, lambda *_: "")
    try:
        trainer.save_hf(path)
    except SlimeError as error:
        return str(error), names
    return "", names


def publish(
    rank: int, world_size: int, hf: str, root: str, unreadable_on: int | None = None, is_blind: int | None = None
) -> dict[str, Any]:
    """Publish the weights as a version of a weight sync through files.

    Returns:
        The error, the files of which this rank took the checksums, and the manifest's checksums on rank 0.
    """
    from slime.backends.training import hf_files
    from slime.utils.errors import EngineError
    from slime.weight_sync import send_disk
    from slime.weight_sync.session import TrainerRanks

    hf_files._MAX_FILE_BYTES = 4096
    trainer = MegatronTrainer(make_args(hf), rank=rank, world_size=world_size, with_ref=False)
    trainer.setup()
    stock, files = send_disk.checksums_of, []

    def take(folder: Path, checksum: Any, share: list[str]) -> dict[str, str]:
        if rank == unreadable_on:
            raise EngineError("the disk cannot be read")
        files.extend(share)
        return stock(folder, checksum, share)

    send_disk.checksums_of = take
    if rank == is_blind:
        send_disk._sizes = lambda _: {}
    ranks = TrainerRanks(rank, world_size, timeout_s=300)
    updater = send_disk.DiskUpdater(ranks, send_disk.DiskSettings(Path(root)))
    error = ""
    try:
        updater._publish(1, trainer)
    except EngineError as caught:
        error = str(caught)
    written = Path(root) / "weight_v000001" / "slime_weights.json"
    return {"error": error, "files": files, "manifest": written.read_text() if written.exists() else ""}


def _fill_disk(full_for: str) -> None:
    from slime.backends.training import checkpoint_files, pieces

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if full_for == "manifest":
        checkpoint_files.write_manifest = full
    else:
        pieces.write = full
