"""A training state of the FSDP backend on disk: torch's distributed checkpoint, readable on any number of ranks.

    <save>/iter_0000012/*.distcp, .metadata    weights, and Adam's moments as ``<parameter>.<state>``
    <save>/iter_0000012/rng_00003.pt           random number generators of rank 3
    <save>/iter_0000012/metadata.json          which backend wrote it; the schedule; the number of ranks
    <save>/iter_0000012/manifest.json          see ``training.checkpoint_files``

Called by ``actor``, on all ranks at once.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slime.backends.fsdp_utils.model import adapter_parameters, saved_tensors
from slime.backends.fsdp_utils.step import TrainState, allocate_states
from slime.backends.training import checkpoint_files as files
from slime.backends.training.adapter_files import ADAPTER
from slime.backends.training.checkpoint_files import checksums_of, written_by
from slime.backends.training.checkpoint_source import DAMAGE, Source, causes_of, unfit, unreadable
from slime.backends.training.pieces import (
    Piece,
    PlainPlanner,
    PlainReader,
    generator_states,
    set_generators,
    write,
)
from slime.utils.distributed_utils import do_on_first_rank, files_group
from slime.utils.errors import ConfigError, SlimeError, kept, named

logger = logging.getLogger(__name__)


def save(state: TrainState, root: str, iteration: int, *, has_optimizer: bool, has_rng: bool, keep: int | None) -> None:
    """Write ``iteration``. It is complete, and named by the tracker, when this returns on all ranks.

    Args:
        keep: newest checkpoints that are kept; None keeps all.

    Raises:
        SlimeError: a rank could not write its part. The checkpoint before it is still complete.
    """
    started = time.monotonic()
    name = files.iteration_directory(root, iteration).name
    partial = files.partial_directory(Path(root), name)  # renamed at the end: a crash leaves the older one
    if failure := do_on_first_rank(lambda: files.make_empty(partial)):
        raise _not_written(root, iteration, f"rank 0: {failure}")
    report = _write(state, partial, has_optimizer=has_optimizer, has_rng=has_rng)
    reports: list[dict[str, str] | str] = [""] * dist.get_world_size()
    dist.all_gather_object(reports, report, group=files_group())  # also the barrier after which every file exists
    checksums: dict[str, str] = {}
    for one in reports:
        checksums |= one if isinstance(one, dict) else {}
    if any(isinstance(one, str) for one in reports):
        named = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(reports) if isinstance(one, str))
        raise _not_written(root, iteration, named)

    def publish() -> None:
        removed = files.publish(
            Path(root),
            name,
            iteration,
            layout={"world_size": dist.get_world_size(), "context": state.sharding.cp_size},
            content={"optimizer": has_optimizer, "rng": has_rng}
            | ({} if state.adapter is None else {ADAPTER: state.adapter}),
            checksums=checksums,
            keep=keep,
        )
        seconds = time.monotonic() - started
        logger.info("saved %s/%s in %.1f s%s", root, name, seconds, f", removed {removed}" if removed else "")

    if failure := do_on_first_rank(publish):
        raise _not_written(root, iteration, f"rank 0: {failure}")


def _not_written(root: str, iteration: int, named: str) -> SlimeError:
    return SlimeError(f"checkpoint {iteration} under {root} could not be written: {named}. Is the disk full?")


def _write(state: TrainState, directory: Path, *, has_optimizer: bool, has_rng: bool) -> dict[str, str] | str:
    """The checksums of this rank's files, or what went wrong. torch lets all ranks fail together."""
    errors: list[BaseException] = []
    with kept(errors, CheckpointException):  # a BaseException of torch. The other ranks wait for this one
        tensors = _tensors(state, has_optimizer=has_optimizer)
        state_dict_saver.save(tensors, storage_writer=_Writer(directory), process_group=files_group())
        if has_rng:
            torch.save(generator_states(), directory / f"rng_{dist.get_rank():05d}.pt")
        if dist.get_rank() == 0:
            content = {
                "sharded_backend": "fsdp",
                "model_type": state.model.config.model_type,
                "num_ranks": dist.get_world_size(),
                "rates": state.rates.state_dict(),
            }
            (directory / "metadata.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
        return checksums_of(written_by(directory, dist.get_rank()))
    return causes_of(errors[0]) if isinstance(errors[0], CheckpointException) else named(errors[0])


class _Writer(FileSystemWriter):
    """torch's writer, with little in host memory at a time."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part."""
        parts = [Piece(item, planner.resolve_data(item)) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(write(parts, Path(self.path), "live", lambda _: None))
        return done


def load_weights(state: TrainState, source: Source) -> None:
    """Load the weights only.

    Raises:
        ConfigError: the checkpoint is damaged, of another model, or of another backend.
    """
    _metadata(state, source)
    _read(_tensors(state, has_optimizer=False), source)


def load_training_state(state: TrainState, source: Source, *, has_optimizer: bool, has_rng: bool) -> None:
    """Restore a training state: weights, optimizer, schedule, random number generators.

    Raises:
        ConfigError: the checkpoint is damaged, of another model or backend, or lacks a requested part.
    """
    content = _metadata(state, source)
    _read(_tensors(state, has_optimizer=has_optimizer), source)
    if has_optimizer:
        state.rates.load_state_dict(content["rates"])
    if has_rng:
        _restore_generators(source, content["num_ranks"])


def _tensors(state: TrainState, *, has_optimizer: bool) -> dict[str, Any]:
    """The live tensors under their names in the checkpoint, of a run with adapters only those. Loading fills them."""
    saved = saved_tensors(state.model) if state.adapter is None else dict(adapter_parameters(state.model))
    tensors = {f"model.{name}": tensor.detach() for name, tensor in saved.items()}
    if has_optimizer:
        allocate_states(state.optimizer)  # an optimizer without a step has no tensors to load into
        for name, parameter in state.model.named_parameters():
            for kind, value in state.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{kind}"] = value
    return tensors


def _read(tensors: dict[str, Any], source: Source) -> None:
    try:
        reader = PlainReader(source.directory)
        state_dict_loader.load(tensors, storage_reader=reader, planner=PlainPlanner(), process_group=files_group())
    except CheckpointException as error:
        raise unfit(source, error) from None


def _metadata(state: TrainState, source: Source) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((Path(source.directory) / "metadata.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise unreadable(source, f"metadata.json is no JSON ({error})") from None
    mine = state.model.config.model_type
    if content.get("model_type") != mine:
        raise ConfigError(
            f"{source.flag} {source.directory} is of model_type {content.get('model_type')}, --hf-checkpoint of {mine}."
        )
    return content


def _restore_generators(source: Source, num_ranks: int) -> None:
    path = Path(source.directory) / f"rng_{dist.get_rank():05d}.pt"
    # A state belongs to one rank, so that another number of ranks cannot continue it.
    if num_ranks != dist.get_world_size() or not path.is_file():
        logger.warning("%s has no random number generators for this rank: they start from --seed.", source.directory)
        return
    try:
        state = torch.load(path, weights_only=True)
    except DAMAGE as error:
        raise unreadable(source, error) from None
    set_generators(state)
