"""Host memory of a node: pinned copies of weights, optimizer states, and the buffers of a save.

Without GPUs also the model itself, in trainer and engines, and the processes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from slime.config.plan.engine import EngineMemory, serves_adapter
from slime.config.plan.layout import Layout, read
from slime.config.plan.memory import StageMemory
from slime.config.plan.placement import Placement

_MIB = 1024**2
# Proportional set sizes of a run of a tiny model on a CPU at their peak, summed: 2487 MiB with one rank and one engine,
# 3583 MiB with two of each. Interpreters and libraries, without weights.
# Driver, Data Buffer, rollout manager, router, Ray, and the process that engines are forked from.
_RUN_BYTES = 1400 * _MIB
_RANK_BYTES = 400 * _MIB
# Per device of an engine: scheduler, HTTP process, detokenizer, Ray actor.
_ENGINE_BYTES = 690 * _MIB


@dataclass(frozen=True)
class HostMemory:
    """The node that needs the most, in bytes. Ray's object store and the page cache are not counted.

    Attributes:
        ranks: of the trainer on this node. With a critic, those of the actor.
        copies: pinned copies of weights, of the trainer and of engines that keep one.
        states: optimizer states that are on the host always, or while engines generate.
        save: buffers while a checkpoint is written.
        trainer: without GPUs: weights, gradients, optimizer states and logits of all ranks. Else 0, as the next two.
        engines: their weights.
        processes: interpreters and libraries.
    """

    node: int
    ranks: int
    copies: int
    states: int
    save: int
    trainer: int = 0
    engines: int = 0
    processes: int = 0

    @property
    def total(self) -> int:
        return self.copies + self.states + self.save + self.trainer + self.engines + self.processes


def host_memory(
    args: Namespace,
    layout: Layout,
    stages: Sequence[StageMemory],
    placement: Placement,
    engine: EngineMemory | None,
    *,
    is_cpu: bool = False,
) -> HostMemory | None:
    """The fullest node of the run. ``is_cpu``: this machine. None if there is nothing to count."""
    if is_cpu:
        return _cpu_memory(layout, stages, placement, engine)
    if not stages:
        return None
    kept = engine.weights if engine and _keeps_weights(args) else 0
    coordinates = layout.ranks
    found = []
    for node in placement.nodes:
        ranks = coordinates[node.ranks[0] : node.ranks[1] + 1] if node.ranks else []
        here = [stages[rank.pp if len(stages) > 1 else 0] for rank in ranks]
        num_devices = node.slots[1] - node.slots[0] + 1 if node.engines else 0
        found.append(
            HostMemory(
                node=node.node,
                ranks=len(ranks),
                copies=sum(stage.host_copies for stage in here) + kept * num_devices,
                states=sum(stage.host_states + stage.host_offloaded for stage in here),
                save=sum(stage.host_save for stage in here),
            )
        )
    return max(found, key=lambda one: one.total)


def _cpu_memory(
    layout: Layout, stages: Sequence[StageMemory], placement: Placement, engine: EngineMemory | None
) -> HostMemory:
    """The whole run on this machine without GPUs, where activations and the cache of engines reuse free pages."""
    ranks = layout.world if stages else 0
    engines = sum(group.num_devices for group in placement.engines)
    of_rank = max((stage.total - stage.activations for stage in stages), default=0)
    return HostMemory(
        node=0,
        ranks=ranks,
        copies=0,
        states=0,
        save=0,
        trainer=ranks * of_rank,
        engines=engines * engine.weights if engine else 0,
        processes=_RUN_BYTES + _RANK_BYTES * ranks + _ENGINE_BYTES * engines,
    )


def _keeps_weights(args: Namespace) -> bool:
    """Whether engines that release their memory keep a copy: not all weights are sent again before each rollout."""
    changed_only = bool(read(args, "update_weight_changed_only"))
    is_part_sent = changed_only or read(args, "update_weights_interval") not in (None, 1) or serves_adapter(args)
    return bool(read(args, "offload_rollout")) and is_part_sent
