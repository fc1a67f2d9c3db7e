"""A simulated training backend: it trains by writing down the samples, and saves that list in real checkpoints.

The list is part of the checkpoint, so after any number of restarts it holds exactly the samples that the current
weights were trained on.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime.backends import EngineFleet, TrainReport
from slime.backends.training import checkpoint_files
from slime.backends.training.arguments import CheckpointArgs
from slime.backends.training.checkpoint_source import find_start
from slime.config.groups import from_args
from slime.weight_sync.chunks import WeightChunk
from slime.weight_sync.session import TrainerRanks, WeightUpdate, load_files, push_weights
from tests.simulation.engines import FIRST_TOKEN
from tests.simulation.world import Process, Thread, world

_STATE = "state.json"
_COLLECTIVE_TIMEOUT_S = 1800.0


@dataclass
class _Group:
    """The ranks that have met at one address.

    Attributes:
        values: per collective, rank -> value.
    """

    members: list[Process] = field(default_factory=list)
    values: list[dict[int, Any]] = field(default_factory=list)
    waiting: list[Thread] = field(default_factory=list)

    def join(self, process: Process) -> None:
        self.members.append(process)
        process.on_death.append(self.wake)

    def wake(self) -> None:
        for thread in self.waiting:
            world().wake(thread)


class SimulatedRanks(TrainerRanks):
    """Collectives of simulated ranks, which fail as gloo's: if a rank is dead, or does not come in time."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, timeout_s=_COLLECTIVE_TIMEOUT_S)
        self._turn = 0
        groups = world().globals.setdefault("groups of ranks", {})
        self._group: _Group = groups.setdefault(os.environ["MASTER_PORT"], _Group())
        self._group.join(world().current.process)

    def gather(self, value: Any) -> list[Any]:
        here, group, turn = world(), self._group, self._turn
        self._turn += 1
        if len(group.values) == turn:
            group.values.append({})
        found = group.values[turn]
        found[self.rank] = value
        group.wake()
        until = here.after(_COLLECTIVE_TIMEOUT_S)
        while len(found) < self.size:
            if any(process.is_dead for process in group.members):
                raise RuntimeError("Connection closed by peer")
            if here.now >= until:
                raise RuntimeError("Timed out waiting for the other ranks")
            group.waiting.append(here.current)
            try:
                here.park(until - here.now)
            finally:
                group.waiting.remove(here.current)
        return [found[rank] for rank in range(self.size)]

    def from_source(self, value: Any) -> Any:
        return self.gather(value)[0]


class SimulatedTrainer:
    """Implements ``slime.backends.Trainer``. All ranks hold the samples of all ranks.

    Attributes:
        trained: per rollout ``{"rollout": id, "samples": [[index, prompt ids, versions, labels], ...]}``. Versions are
            those in the tokens, labels those that the engines reported.
    """

    def __init__(self, args: Any, *, rank: int, world_size: int, with_ref: bool) -> None:
        self._args = args
        self.ranks = SimulatedRanks(rank, world_size)
        self.is_weight_source = self.ranks.is_source
        self.data_parallel = (rank, world_size)
        self.trained: list[dict[str, Any]] = []
        self._next = 0

    def setup(self) -> int:
        here = world()
        here.sleep(0.5 + here.random.random())
        source = find_start(from_args(CheckpointArgs, self._args), self._args.hf_checkpoint)
        if source.is_training_state:
            directory = Path(source.directory)
            manifest = checkpoint_files.read_manifest(directory)
            assert manifest is not None
            damage = checkpoint_files.find_damage(directory, manifest.checksums)
            assert not damage, damage
            self.trained = json.loads((directory / _STATE).read_text(encoding="utf-8"))
            self._next = source.iteration + 1
        starts = self.ranks.gather(self._next)
        assert set(starts) == {self._next}, f"ranks start at rollouts {starts}"
        here.note(f"trainer starts at {self._next}")
        if self.is_weight_source:
            here.globals["trained"] = self.trained
        return self._next

    def train(self, rollout_id: int, batch: dict[str, Any]) -> TrainReport:
        here = world()
        here.sleep(0.2 + 0.3 * here.random.random())
        labels = batch.get("weight_versions") or [[] for _ in batch["tokens"]]
        samples = []
        for index, tokens, length, label in zip(
            batch["sample_indices"], batch["tokens"], batch["response_lengths"], labels, strict=True
        ):
            ids = [int(token) for token in tokens]
            cut = len(ids) - length
            samples.append([index, ids[:cut], sorted({token - FIRST_TOKEN for token in ids[cut:]}), sorted(set(label))])
        samples = [sample for part in self.ranks.gather(samples) for sample in part]
        self.trained.append({"rollout": rollout_id, "samples": samples})
        self._next = rollout_id + 1
        here.note(f"trained {rollout_id} on {sorted(sample[0] for sample in samples)}")
        return TrainReport(steps=[{"loss": 0.0, "grad_norm": 1.0}] if self.is_weight_source else [])

    def adapter_proof(self, version: str) -> None:
        return None

    def keep_version(self, version: str) -> None: ...

    def save(self, rollout_id: int) -> None:
        if self.is_weight_source:
            self._write(rollout_id)
        self.ranks.gather(None)

    def _write(self, rollout_id: int) -> None:
        root = Path(self._args.save)
        name = checkpoint_files.iteration_directory(root, rollout_id).name
        partial = checkpoint_files.partial_directory(root, name)
        checkpoint_files.make_empty(partial)
        world().sleep(0.1)
        state = partial / _STATE
        state.write_text(json.dumps(self.trained), encoding="utf-8")
        (partial / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}), encoding="utf-8")
        world().globals["disk"].sync_tree(partial)
        sums = {path.name: checkpoint_files.checksum(path) for path in partial.iterdir()}
        checkpoint_files.publish(root, name, rollout_id, layout={}, content={}, checksums=sums)

    def finish_saves(self) -> None: ...

    def offload(self, parts: Any = ()) -> None: ...

    def onload(self, parts: Any = ()) -> None: ...

    @property
    def num_trained(self) -> int:
        return self._next


class Updater:
    """Sends the number of rollouts that the weights were trained on: as a name, or as a tensor of all ranks."""

    changed_share = None

    def __init__(self, world_size: int) -> None:
        self._is_alone = world_size == 1

    def update(self, fleet: EngineFleet, trainer: SimulatedTrainer, update: WeightUpdate) -> int:
        number = trainer.num_trained
        if self._is_alone:
            load_files(fleet, f"weights/{number}", update)
            return 1
        weights = (("number", torch.tensor(max(trainer.ranks.gather(number)))) for _ in range(1))
        return push_weights(fleet, _Sender(fleet, trainer.ranks.is_source, update), weights, update, trainer.ranks)

    def disconnect(self) -> None: ...


@dataclass
class _Sender:
    """``slime.weight_sync.session.ChunkSender``."""

    fleet: EngineFleet
    is_source: bool
    update: WeightUpdate

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        if self.is_source:
            for _, number in chunk.tensors:
                loading = self.fleet.start("load_number", trained_on=int(number), weight_version=weight_version)
                loading.wait(self.update.timeout_s)

    def finish(self) -> None: ...

    def disconnect(self) -> None: ...
