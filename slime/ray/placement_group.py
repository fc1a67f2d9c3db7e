"""Device slots of trainer and engines: one placement group, sorted by node and device.

                 slots of the trainer   slots of the engines
                 0 ... A-1              A ... A+R-1
--colocate       0 ... A-1              0 ... R-1
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.config.plan.devices import colocation_problems, gpu_bytes, is_judged
from slime.ray.run.cluster import NOSET_VISIBLE_DEVICES, is_embedded, slot_layout, worker_env
from slime.ray.watch import get
from slime.ray.watch.failure_report import Reports, shortage_of
from slime.utils import accelerator
from slime.utils.async_utils import Deadline
from slime.utils.errors import ConfigError, undone

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class GpuSlots:
    """Device slots of a placement group, in node and device order.

    Attributes:
        group: the Ray placement group. None without slots.
        bundles: bundle index of each slot.
        device_ids: physical device id of each slot on its node. The slot number if devices are logical.
        visible_ids: number of each slot's device among those that a process on its node sees, which
            ``CUDA_VISIBLE_DEVICES`` may restrict. Empty if devices are logical.
        device_bytes: memory of the largest device. 0 if it is unknown.
    """

    group: PlacementGroup | None
    bundles: Sequence[int]
    device_ids: Sequence[int]
    visible_ids: Sequence[int] = ()
    device_bytes: int = 0

    def __len__(self) -> int:
        return len(self.bundles)

    def __getitem__(self, part: slice) -> GpuSlots:
        return GpuSlots(self.group, self.bundles[part], self.device_ids[part], self.visible_ids[part])

    def strategy(self, slot: int) -> PlacementGroupSchedulingStrategy:
        """Scheduling strategy that pins an actor to ``slot``. Its child tasks stay in the group."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.bundles[slot],
            placement_group_capture_child_tasks=True,
        )


def create_placement_groups(args: Namespace) -> dict[str, GpuSlots]:
    """Reserve every device slot of the run. Returns the slots of ``"actor"`` and ``"rollout"``.

    Raises:
        ConfigError: a trainer with adapters and its engines do not fit on the devices that they share.
    """
    layout = slot_layout(args)
    slots = _reserve(layout.total, args.placement_timeout, asks_memory=is_judged(args))
    if problems := list(colocation_problems(args, slots.device_bytes)):
        release_placement_groups({"all": slots})
        raise ConfigError(problems)
    first = layout.first_engine
    return {"actor": slots[: layout.train], "rollout": slots[first : first + layout.engines]}


def release_placement_groups(slots: Mapping[str, GpuSlots]) -> None:
    """Release every slot. Ray kills the actors that are still on one."""
    for group in {id(part.group): part.group for part in slots.values()}.values():
        if group is not None:
            remove_placement_group(group)


def check_room(num_gpus: int) -> None:
    """Refuse engines for which the embedded cluster, which cannot grow, has no devices. Raises ConfigError."""
    free = int(ray.available_resources().get("GPU", 0.0))
    if is_embedded() and free < num_gpus:
        raise ConfigError(f"the engines that join need {num_gpus} free device slots, and this machine has {free}.")


def reserve_engine(num_gpus: int, timeout_s: float) -> GpuSlots:
    """Reserve devices of one node for an engine that joins. Waits until the cluster has them.

    Raises:
        DeadlineExceeded: no node had them in time.
    """
    return _reserve(num_gpus, timeout_s, strategy="STRICT_PACK")


def _reserve(count: int, timeout_s: float, *, asks_memory: bool = False, strategy: str = "PACK") -> GpuSlots:
    if count == 0:
        return GpuSlots(None, [], [])
    bundles = [{"GPU": 1.0, "CPU": 1.0}] * count
    group = placement_group(bundles, strategy=strategy)
    with undone(lambda: remove_placement_group(group)):  # it would take the slots as soon as they are free
        _wait_for(group, bundles, timeout_s)
        nodes = set(placement_group_table(group)["bundles_to_node_id"].values())
        if len(nodes) == 1 and accelerator.current().is_cpu:
            return GpuSlots(group, range(count), range(count))  # logical slots of one host need no order
        return _ordered(group, count, timeout_s, asks_memory=asks_memory)


def _wait_for(group: PlacementGroup, bundles: Sequence[Mapping[str, float]], timeout_s: float) -> None:
    """Wait until the group is reserved. An existing cluster may grow until then.

    Raises:
        ConfigError: the embedded cluster is too small.
        DeadlineExceeded: with the missing resource.
    """
    fix = "ask for fewer devices with --actor-num-gpus-per-node / --rollout-num-gpus"
    what = f"Ray to reserve {len(bundles)} device slots of 1 GPU and 1 CPU each"
    deadline = Deadline(timeout_s, what, f"Start nodes, {fix}, or raise --placement-timeout")
    reports = Reports()
    while not group.wait(timeout_seconds=min(_LOOK_EVERY_S, max(0.1, deadline.remaining))):
        missing = shortage_of(bundles)
        if missing is not None and missing.is_final and is_embedded():
            raise ConfigError(f"the run needs {len(bundles)} device slots of 1 GPU and 1 CPU each: {missing}; {fix}.")
        deadline.check(str(missing or "Ray does not report its resources"))
        if reports.is_due():
            logger.warning("has waited %.0f s for %s: %s", deadline.elapsed, what, missing)


@dataclass(frozen=True)
class _Place:
    """Node and device of a slot. Nodes that are simulated on one host have the same address."""

    address: str
    node_id: str
    device_id: int
    visible_id: int
    device_bytes: int

    @property
    def order(self) -> tuple[tuple[int, ...], str, int]:
        return _address_key(self.address), self.node_id, self.device_id


class _Probe:
    def locate(self, asks_memory: bool) -> _Place:
        device_id = _number_of(ray.get_gpu_ids())
        node_id = ray.get_runtime_context().get_node_id()
        visible_id = accelerator.resolve_visible_device_id(device_id)
        memory = gpu_bytes(device_id) if asks_memory and not accelerator.current().is_cpu else 0
        return _Place(ray.util.get_node_ip_address(), node_id, device_id, visible_id, memory)


def _number_of(device_ids: Sequence[int | str]) -> int:
    """Number of the device that Ray assigned to a process, or 0."""
    name = str(device_ids[0]) if device_ids else "0"
    if not name.isdecimal():
        variable = accelerator.visible_devices_env_key()
        raise ConfigError(
            f"{variable}={os.environ.get(variable)} names the device {name}: start Ray on that node with numbers, such "
            f"as {variable}=0,1, by which engines and trainer ranks are given devices that follow one another."
        )
    return int(name)


def _ordered(group: PlacementGroup, count: int, timeout_s: float, *, asks_memory: bool = False) -> GpuSlots:
    """Sort bundles by node and device, so that neighboring ranks share a node."""
    # As long as the reservation: hundreds of cold processes import their code from one file system.
    unordered = GpuSlots(group, range(count), range(count))
    env = {"env_vars": worker_env() | NOSET_VISIBLE_DEVICES}
    actor = ray.remote(num_gpus=1)(_Probe)
    probes = [actor.options(scheduling_strategy=unordered.strategy(i), runtime_env=env).remote() for i in range(count)]
    calls, what = [probe.locate.remote(asks_memory) for probe in probes], "device slots to report their nodes"
    places: list[_Place] = get(calls, timeout_s, what, "--placement-timeout")
    for probe in probes:  # killed now: each one holds the whole GPU of its slot
        ray.kill(probe)
    order = sorted(range(count), key=lambda i: places[i].order)
    for slot, place in enumerate(places[i] for i in order):
        logger.info("slot %d: device %d of node %s (%s)", slot, place.device_id, place.address, place.node_id[:8])
    largest = max(place.device_bytes for place in places)
    ids, visible_ids = [places[i].device_id for i in order], [places[i].visible_id for i in order]
    return GpuSlots(group, order, ids, visible_ids, largest)


def _address_key(address: str) -> tuple[int, ...]:
    parts = address.split(".")
    # numbers, because as text 10.0.0.10 would come before 10.0.0.9
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else tuple(map(ord, address))
