"""Processes of a run and their places, and the parallel layout of the trainer: coordinates and layers of every rank.

Slots are devices in node order, as ``slime.ray.placement_group`` reserves them: trainer ranks first, then
engines, or both on the same slots with --colocate.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config.yaml_file import read_mapping

# A mistyped size must not produce a plan of millions of lines.
_MOST_SLOTS = 100_000


@dataclass(frozen=True)
class EngineGroup:
    """Engines of one kind.

    Attributes:
        kind: their task. A ``placeholder`` is devices without engines, counted as engines of one device.
        first_slot: None for external engines.
        first_number: of its engines in the run, through all models.
    """

    model: str
    kind: str
    num_engines: int
    devices_per_engine: int
    first_slot: int | None
    first_number: int = 0

    @property
    def num_devices(self) -> int:
        return self.num_engines * self.devices_per_engine


@dataclass(frozen=True)
class NodePlan:
    """Processes of one node: inclusive ranges, or None."""

    node: int
    slots: tuple[int, int]
    ranks: tuple[int, int] | None
    coordinates: dict[str, tuple[int, int]]
    engines: list[str]


@dataclass(frozen=True)
class Placement:
    """All processes of the run."""

    num_nodes: int
    num_slots: int
    devices_per_node: int
    is_colocated: bool
    num_trainer_ranks: int
    has_critic: bool
    engines: list[EngineGroup]
    routers: list[str]
    nodes: list[NodePlan]


def plan_placement(args: Namespace, layout: Layout, *, is_cpu: bool = False) -> Placement:
    """The processes and their slots. ``is_cpu``: all are on this machine.

    Raises:
        PlanError: the engines' flags do not say how many there are, or there are too many to list.
    """
    num_ranks = 0 if read(args, "debug_rollout_only") else layout.world
    is_colocated = bool(read(args, "colocate"))
    engines = _engine_groups(args, 0 if is_colocated else num_ranks)
    per_node = max(1, number(args, "num_gpus_per_node", 8))
    ends = [group.first_slot + group.num_devices for group in engines if group.first_slot is not None]
    num_slots = max([num_ranks, *ends])
    if num_slots > _MOST_SLOTS:
        raise PlanError(f"{num_slots} devices are more than the {_MOST_SLOTS} that a plan lists.")
    if is_cpu:
        per_node = max(1, num_slots)
    num_nodes = -(-num_slots // per_node)
    return Placement(
        num_nodes=max(1, num_nodes),
        num_slots=num_slots,
        devices_per_node=per_node,
        is_colocated=is_colocated,
        num_trainer_ranks=num_ranks,
        has_critic=bool(read(args, "use_critic")) and num_ranks > 0,
        engines=engines,
        routers=_routers(args, engines),
        nodes=_nodes(layout, num_ranks, engines, num_slots, per_node),
    )


def _engine_groups(args: Namespace, first_slot: int) -> list[EngineGroup]:
    if read(args, "debug_train_only"):
        return []
    model = Path(str(read(args, "hf_checkpoint"))).name
    addresses = read(args, "rollout_external_engine_addrs")
    width = number(args, "rollout_num_gpus_per_engine", 1)
    if addresses:
        return [EngineGroup(model, "external", len(addresses), width, None)]
    if read(args, "sglang_config"):
        return _configured(args, first_slot, model, width)
    total = number(args, "rollout_num_gpus", 0)
    num_engines, num_prefill = total // width, number(args, "prefill_num_servers", 0)
    if not num_prefill:
        if total == 0:  # they register with the router later
            return [EngineGroup(model, "external", 0, width, None)]
        return [EngineGroup(model, "regular", num_engines, width, first_slot)] if num_engines else []
    decode_slot = first_slot + num_prefill * width
    return [
        EngineGroup(model, "prefill", num_prefill, width, first_slot),
        EngineGroup(model, "decode", max(0, num_engines - num_prefill), width, decode_slot, num_prefill),
    ]


def _configured(args: Namespace, first_slot: int, default_model: str, default_width: int) -> list[EngineGroup]:
    """The groups of the --sglang-config file, in its order."""
    models = read_mapping("--sglang-config", args.sglang_config).get("sglang")
    if not isinstance(models, list):
        raise PlanError(f"--sglang-config {args.sglang_config} has no list under the key sglang.")
    groups: list[EngineGroup] = []
    slot, first_number = first_slot, 0
    for model in (entry for entry in models if isinstance(entry, dict)):
        for group in model.get("server_groups") or model.get("engine_groups") or []:
            num_devices: Any = group.get("num_gpus") if isinstance(group, dict) else None
            if not isinstance(num_devices, int):
                raise PlanError(f"--sglang-config {args.sglang_config}: a server group has no num_gpus.")
            name, kind = str(model.get("name", default_model)), str(group.get("worker_type", "regular"))
            width = group.get("num_gpus_per_engine") or model.get("num_gpus_per_engine") or default_width
            width = 1 if kind == "placeholder" else width
            groups.append(EngineGroup(name, kind, num_devices // width, width, slot, first_number))
            # Devices of placeholders stay unused, but take slots.
            slot += num_devices
            # Placeholders start no engine, so they take no number.
            first_number += 0 if kind == "placeholder" else num_devices // width
    return groups


def _routers(args: Namespace, engines: list[EngineGroup]) -> list[str]:
    """One router per model. The first may be one that runs already."""
    models = list(dict.fromkeys(group.model for group in engines))
    address = read(args, "sglang_router_ip")
    existing = f"{address}:{read(args, 'sglang_router_port')}" if address and read(args, "sglang_router_port") else ""
    return [f"{model} (existing, {existing})" if existing and not i else model for i, model in enumerate(models)]


def _nodes(layout: Layout, num_ranks: int, engines: list[EngineGroup], num_slots: int, per_node: int) -> list[NodePlan]:
    ranks = layout.ranks
    nodes = []
    for node, first in enumerate(range(0, num_slots, per_node)):
        last = min(first + per_node, num_slots) - 1
        here = ranks[first : min(last + 1, num_ranks)]
        numbers = {name: [getattr(rank, name) for rank in here] for name in ("tp", "cp", "dp", "pp", "ep")}
        coordinates = {name: (min(values), max(values)) for name, values in numbers.items() if here}
        nodes.append(
            NodePlan(
                node=node,
                slots=(first, last),
                ranks=(here[0].rank, here[-1].rank) if here else None,
                coordinates=coordinates,
                engines=[text for group in engines if (text := _engines_on(group, first, last))],
            )
        )
    return nodes


def _engines_on(group: EngineGroup, first: int, last: int) -> str:
    """The engines of ``group`` with a device among the slots: ``engines 2-3``."""
    if group.first_slot is None or not group.num_devices:
        return ""
    begin = max(first, group.first_slot) - group.first_slot
    end = min(last, group.first_slot + group.num_devices - 1) - group.first_slot
    if begin > end:
        return ""
    if group.kind == "placeholder":
        return f"{end - begin + 1} left alone"
    low = group.first_number + begin // group.devices_per_engine
    high = group.first_number + end // group.devices_per_engine
    kind = "engine" if group.kind == "regular" else f"{group.kind} engine"
    return f"{kind} {low}" if low == high else f"{kind}s {low}-{high}"


# ---- device memory by phase if trainer and engines share devices; the order is in slime.ray.run.device_handoff


@dataclass(frozen=True)
class Turn:
    """One turn of a rollout, and the contents of device memory during it."""

    name: str
    engines: str
    trainer: str


def plan_turns(args: Namespace) -> list[Turn]:
    """The turns of one rollout, in order. Empty if no memory moves."""
    ends, moves = bool(read(args, "release_train")), bool(read(args, "offload_train"))
    releases = bool(read(args, "colocate")) and bool(read(args, "offload_rollout"))
    if read(args, "debug_rollout_only") or not (ends or moves or releases):
        return []
    everything = "weights, gradients, optimizer"
    away = "no process" if ends else "nothing: it is in host memory" if moves else everything
    has_engines = not read(args, "debug_train_only")
    awake, asleep = ("weights, KV cache", "nothing" if releases else "weights, KV cache") if has_engines else ("-", "-")
    turns = [Turn("rollout", awake, away)] if not read(args, "is_async") else []
    if read(args, "use_critic"):
        turns.append(Turn("training, critic", asleep, f"the critic's {everything}"))
    turns.append(Turn("training, saving", asleep, everything))
    if has_engines:
        trainer = "weights" if moves or ends else everything
        turns.append(Turn("weight sync", "weights" if releases else awake, trainer))
    return turns


@dataclass(frozen=True)
class Rank:
    """Coordinates of one trainer rank."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class Layout:
    """World = TP x CP x DP x PP. For experts the same ranks are world = ETP x EP x EDP x PP (ranks: TP fastest)."""

    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    vpp: int
    has_sequence_parallel: bool

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Copies of an expert: the ranks among which its optimizer states are sharded."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def ranks(self) -> list[Rank]:
        """Order "tp-cp-ep-dp-pp": tensor-parallel ranks are neighbors, pipeline stages are farthest apart."""
        return [self._rank(index) for index in range(self.world)]

    def _rank(self, index: int) -> Rank:
        rest, tp = divmod(index, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        # Experts divide the same ranks in another order: ETP fastest, then EP.
        return Rank(index, tp, cp, dp, pp, index // self.etp % self.ep)


def read_layout(args: Namespace) -> Layout:
    """The layout that the flags ask for.

    Raises:
        PlanError: the world does not divide.
    """
    tp = number(args, "tensor_model_parallel_size", 1)
    pp = number(args, "pipeline_model_parallel_size", 1)
    cp = number(args, "context_parallel_size", 1)
    ep = number(args, "expert_model_parallel_size", 1)
    etp = number(args, "expert_tensor_parallel_size", tp)
    world = number(args, "world_size", 1)
    if min(tp, pp, cp, ep, etp, world) < 1:
        raise PlanError("a parallel size is below 1.")
    if world % (tp * pp * cp):
        raise PlanError(f"{world} trainer ranks do not divide by TP {tp} x PP {pp} x CP {cp}.")
    if ep > 1 and world % (etp * ep * pp):
        raise PlanError(f"{world} trainer ranks do not divide by ETP {etp} x EP {ep} x PP {pp}.")
    return Layout(
        world=world,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp if ep > 1 or read(args, "expert_tensor_parallel_size") is not None else tp,
        vpp=number(args, "virtual_pipeline_model_parallel_size", 1),
        has_sequence_parallel=bool(read(args, "sequence_parallel")) and tp > 1,
    )


def _extra_layers(args: Namespace) -> tuple[int, int]:
    """Layers that the split counts on the first and on the last stage for embedding and loss: 0 or 1."""
    first, last = (
        read(args, "account_for_embedding_in_pipeline_split"),
        read(args, "account_for_loss_in_pipeline_split"),
    )
    return int(bool(first)), int(bool(last))


def stage_layers(args: Namespace, num_layers: int, pp: int) -> Sequence[range]:
    """Layers of each pipeline stage. The first and last may be given, the others share the rest evenly.

    Raises:
        PlanError: they cannot.
    """
    if read(args, "pipeline_model_parallel_layout") is not None:
        raise PlanError("--pipeline-model-parallel-layout: free layouts are not covered by the formulas.")
    first, last = read(args, "decoder_first_pipeline_num_layers"), read(args, "decoder_last_pipeline_num_layers")
    if pp == 1:
        return [range(num_layers)]
    ends = [item for item in (first, last) if item is not None]
    extra = _extra_layers(args)
    middle, rest = pp - len(ends), num_layers + sum(extra) - sum(ends)
    if rest < 0 or (middle and rest % middle) or (not middle and rest):
        raise PlanError(f"{num_layers} layers do not divide over {pp} pipeline stages.")
    sizes = [rest // middle if middle else 0] * pp
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    # Embedding and loss took the place of these layers.
    sizes[0], sizes[-1] = sizes[0] - extra[0], sizes[-1] - extra[1]
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


# ---- reading the namespace: a flag that no room declares reads as "not given"


class PlanError(ValueError):
    """A section cannot be computed. The text is the reason. The rest of the plan is still printed."""


def read(args: Namespace, name: str) -> Any:
    """The value of ``name``, or None if the namespace lacks it."""
    return vars(args).get(name)


def number(args: Namespace, name: str, default: int) -> int:
    """An integer flag, or ``default`` if it is unset."""
    value = read(args, name)
    return default if value is None else int(value)
