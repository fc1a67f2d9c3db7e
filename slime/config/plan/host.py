"""Host memory of a node: pinned copies of weights, optimizer states, and the buffers of a save."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from slime.config.plan.engine import EngineMemory
from slime.config.plan.layout import Layout, read
from slime.config.plan.memory import StageMemory
from slime.config.plan.placement import Placement


@dataclass(frozen=True)
class HostMemory:
    """The node that needs the most, in bytes. The processes, Ray's object store and the page cache are not counted.

    Attributes:
        ranks: of the trainer on this node. With a critic, those of the actor.
        copies: pinned copies of weights, of the trainer and of engines that keep one.
        states: optimizer states that are on the host always, or while engines generate.
        save: buffers while a checkpoint is written.
    """

    node: int
    ranks: int
    copies: int
    states: int
    save: int

    @property
    def total(self) -> int:
        return self.copies + self.states + self.save


def host_memory(
    args: Namespace, layout: Layout, stages: Sequence[StageMemory], placement: Placement, engine: EngineMemory | None
) -> HostMemory:
    """The fullest node of the run."""
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


def _keeps_weights(args: Namespace) -> bool:
    """Whether engines that release their memory keep a copy: not all weights are sent again before each rollout."""
    changed_only = bool(read(args, "update_weight_changed_only"))
    return bool(read(args, "offload_rollout")) and (
        read(args, "update_weights_interval") not in (None, 1) or changed_only
    )
