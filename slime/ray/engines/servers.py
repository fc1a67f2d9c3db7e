"""All models that a run serves: one router and its engines for each, started, watched and stopped together.

    --sglang-config, --prefill-num-servers   topology: models -> groups -> places of engines on the run's devices
    --rollout-external-engine-addrs          one model, whose engines already run elsewhere
    --rollout-num-gpus 0                     one model, whose engines are registered with its router by others

Owned by the rollout manager. On a CPU engines are forked from a process that has imported SGLang (``preloading``).
Engines on other nodes, and engines on GPUs, import SGLang themselves.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray

from slime.backends.sglang_utils.external import ExternalEngineInfo, discover_external_engines, problems_of
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.router import ExistingRouter, Router, RouterProcess, registered_workers
from slime.backends.sglang_utils.server_process import ForkAddress
from slime.backends.sglang_utils.topology import EnginePlace, topology_of
from slime.config.arguments import ClusterArgs, FaultToleranceArgs
from slime.config.groups import RunConfig, from_args
from slime.ray.engines.actor import EngineActor, ExternalEngineActor, NodeSlot
from slime.ray.engines.elastic import ElasticEngines, ServedModel
from slime.ray.engines.fleet import EngineMemory, RayEngineFleet, WaitingEngines
from slime.ray.engines.preloading import FORK_SERVER_LOG, ClusterForkServer, engine_log_directory, fork_server_of
from slime.ray.engines.slot import WatchSettings
from slime.ray.engines.slots import EngineSlots
from slime.ray.placement_group import GpuSlots, check_room, release_placement_groups, reserve_engine
from slime.ray.run.cluster import NOSET_VISIBLE_DEVICES, node_address, slot_layout, worker_env
from slime.ray.run.device_handoff import engines_share_devices
from slime.utils import accelerator
from slime.utils.async_utils import Deadline
from slime.utils.errors import ConfigError, EngineError, undone

logger = logging.getLogger(__name__)

_ENGINE_THREADS = 4
_DEFAULT_MODEL = "default"
_LOOK_EVERY_S = 0.5
_REPORT_EVERY_S = 60.0
_START_GRACE_S = 60.0
_FIRST_WAIT_TIMEOUT_S = 300.0
_REGISTERED = "the registered engine"


class RolloutServers(EngineMemory, ElasticEngines):
    """All routers and engines of a run. The constructor returns at once. :meth:`wait_ready` waits.

    Args:
        slots: devices of the engines.
    """

    _check_room = staticmethod(check_room)
    _reserve_engine = staticmethod(reserve_engine)
    _release = staticmethod(release_placement_groups)

    def __init__(self, config: RunConfig, slots: GpuSlots) -> None:
        self._args = args = config.args
        self._gpus = slots
        self.memory_timeout_s = args.weight_sync_timeout
        self.replaces_dead = args.use_fault_tolerance
        self._fork_server: ForkServer | ClusterForkServer | None = None
        self._models: list[ServedModel] = []
        self._places: dict[int, EnginePlace] = {}
        self._external: dict[int, ExternalEngineInfo] = {}
        self._joined: dict[int, GpuSlots] = {}
        self._reserving: set[int] = set()
        self._changing = threading.RLock()
        with undone(self.stop):  # no router may survive
            if args.rollout_external:
                self._use_external(ExternalEngineInfo.of_all(args.rollout_external_engine_infos))
            elif self.awaits_engines:
                self._use_external([])
            else:
                self._start_local()

    # ---------------------------------------------------------------- start

    def _start_local(self) -> None:
        topology = topology_of(self._args)
        places = topology.places(self._args.hf_checkpoint)
        if accelerator.current().is_cpu and any(places.values()):
            self._fork_server = fork_server_of(engine_log_directory(self._args) / FORK_SERVER_LOG)
        for model in topology.models:
            updates = model.updates_weights
            by_rank = {place.rank: self._for_model(place, updates) for place in places[model.name]}
            router = self._router(model.name, has_pd=model.has_pd)
            self._places |= by_rank
            engines = self._slots_of(list(by_rank), router, needs_weights=updates)
            may_grow = bool(by_rank) and not model.has_pd
            self._models.append(
                ServedModel(model.name, router, engines, updates, ranks=tuple(by_rank), may_grow=may_grow)
            )

    def _slots_of(self, ranks: Sequence[int], router: Router, *, needs_weights: bool = True) -> EngineSlots:
        return EngineSlots(
            *(self._make_any, ranks, router.url),
            needs_weights=needs_weights,
            kind_of=self._kind_of,
            on_gone=self._on_gone,
        )

    @property
    def awaits_engines(self) -> bool:
        """Whether others register the engines with the router."""
        return not self._args.rollout_external and self._args.rollout_num_gpus == 0

    def _use_external(self, infos: Sequence[ExternalEngineInfo]) -> None:
        self._external |= dict(enumerate(infos))
        router = self._router(_DEFAULT_MODEL, has_pd=any(info.is_pd_worker for info in infos))
        engines = self._slots_of(list(self._external), router)
        self._models.append(ServedModel(_DEFAULT_MODEL, router, engines, True, registers=not self.awaits_engines))

    def await_engines(self) -> None:
        """Wait until an engine has registered with the router of a run that starts none.

        Raises:
            DeadlineExceeded: none has within ``--engine-start-timeout``.
            ConfigError: it does not fit the run.
        """
        router = self._models[0].router
        router.wait_ready()
        fix = (
            f"Start SGLang servers and register each: curl {router.url}/workers -H 'Content-Type: application/json' -d "
            '\'{"url": "http://HOST:PORT"}\'; --engine-start-timeout says how long the run waits'
        )
        what = f"an engine to register with the router at {router.url}, because --rollout-num-gpus 0 starts none"
        deadline, report_at_s = Deadline(self._args.engine_start_timeout, what, fix), 0.0
        while not self._adopt():
            router.raise_if_dead()
            if deadline.elapsed >= report_at_s:
                logger.warning("waits for %s. %s", what, fix)
                report_at_s += _REPORT_EVERY_S
            deadline.check()
            time.sleep(_LOOK_EVERY_S)

    def _adopt(self) -> int:
        """Add the engines that have registered since the last call. Returns the number of engines."""
        (model,) = self._models
        known = {info.url for info in self._external.values()}  # not those that have left: they may come back
        urls = [url for url in registered_workers(model.router.url) if url not in known]
        if urls:
            found = discover_external_engines(urls, source=_REGISTERED)
            if problems := [text for info in found for text in problems_of(info, self._args, source=_REGISTERED)]:
                raise ConfigError(problems)
            with self._changing:
                new = dict(enumerate(found, self._next_rank()))
                self._external |= new
            model.engines.start(list(new))
            model.engines.wait_ready(self._args.engine_start_timeout)
            self._note_number()
            logger.info("engines that have registered with the router: %s", ", ".join(urls))
        return len(self._external)

    def _router(self, model: str, *, has_pd: bool) -> Router:
        """The router that the command line names for the first model, or a new one on this node."""
        args = self._args
        is_first = not self._models
        if is_first and args.sglang_router_ip is not None:
            return ExistingRouter(args.sglang_router_ip, args.sglang_router_port)
        return RouterProcess(
            node_address(),
            args.sglang_router_port if is_first else None,
            request_timeout_s=args.sglang_router_request_timeout_secs,
            flags=args.router_argv,
            log_path=engine_log_directory(args) / ("router.log" if is_first else f"router_{model}.log"),
            has_pd=has_pd,
        )

    def _make_any(self, rank: int, num_before: int) -> Any:
        """A new actor of engine ``rank``."""
        if rank in self._external:
            actor = ray.remote(ExternalEngineActor).options(
                num_cpus=0, max_concurrency=_ENGINE_THREADS, runtime_env={"env_vars": worker_env()}
            )
            args = self._args
            return actor.remote(rank, self._external[rank], args.engine_start_timeout, args.weight_sync_timeout)
        place = at = self._places[rank]
        gpus: GpuSlots = self._gpus
        if rank in self._joined:
            gpus, at = self._joined[rank], replace(place, first_slot=0)
        self._check_nodes(at, gpus)
        local = ray.remote(EngineActor).options(
            num_cpus=0.2,
            num_gpus=0.2,
            max_concurrency=_ENGINE_THREADS,
            scheduling_strategy=gpus.strategy(at.first_slot),
            runtime_env={"env_vars": worker_env() | NOSET_VISIBLE_DEVICES},
        )
        device, others = gpus.device_ids[at.first_slot], self._other_slots(at)
        return local.remote(self._args, place, self._slot(place), device, self._fork_address(), num_before, others)

    def _check_nodes(self, place: EnginePlace, gpus: GpuSlots) -> None:
        """Refuse an engine whose devices on one node are not consecutive, or are those of two nodes."""
        # A server counts upward from its first device: with a gap it would use devices of other processes. Slots are
        # ordered by node and device, so device numbers that do not rise belong to two nodes.
        per_node = self._args.num_gpus_per_node
        is_cpu = accelerator.current().is_cpu
        if is_cpu and place.num_gpus <= per_node:
            return  # logical devices: any server can use them
        end = place.first_slot + place.num_gpus
        for first in range(place.first_slot, end, per_node):
            part = slice(first, min(first + per_node, end))
            numbers = list(gpus.device_ids[part])
            if any(after <= before for before, after in itertools.pairwise(numbers)):
                raise ConfigError(
                    f"--num-gpus-per-node {per_node}: engine {place.rank} got the devices {numbers}, but needs "
                    "those of one node. Give the number that every node of Ray has free, and let the trainer, or a "
                    "placeholder of --sglang-config, fill a node where an engine would begin too late on it."
                )
            seen = gpus.visible_ids[part]
            if not is_cpu and any(after != before + 1 for before, after in itertools.pairwise(seen)):
                raise ConfigError(
                    f"--rollout-num-gpus-per-engine {place.num_gpus}: engine {place.rank} got the devices {numbers} of "
                    "a node that other jobs use as well; it needs devices that follow one another. Start Ray there "
                    "with CUDA_VISIBLE_DEVICES naming the devices of this run alone, or make engines smaller."
                )

    def _other_slots(self, place: EnginePlace) -> list[NodeSlot]:
        """The first devices of an engine on its other nodes."""
        per_node = self._args.num_gpus_per_node
        firsts = [place.first_slot + node * per_node for node in range(1, place.num_nodes(per_node))]
        return [NodeSlot(self._gpus.strategy(slot), self._gpus.device_ids[slot]) for slot in firsts]

    def _slot(self, place: EnginePlace) -> int:
        """First device of an engine among all devices of the run, the trainer's first."""
        return place.first_slot + slot_layout(self._args).first_engine

    def _for_model(self, place: EnginePlace, updates_weights: bool) -> EnginePlace:
        """Add server fields that differ between engines. Fields of the user's file take precedence."""
        fields = {}
        if self._args.offload_rollout:
            if self._slot(place) >= self._args.world_size:
                fields["enable_memory_saver"] = False
            elif not updates_weights:  # nothing sends them again after memory was released
                fields["enable_weights_cpu_backup"] = True
        if self._args.use_rollout_routing_replay and not updates_weights:
            fields["enable_return_routed_experts"] = False  # SGLang refuses it for a model without experts
        return replace(place, overrides=fields | dict(place.overrides))

    def _fork_address(self) -> ForkAddress | None:
        """None also if the preloading process is dead: engines that start later can import SGLang themselves."""
        if self._fork_server is None:
            return None
        try:
            self._fork_server.raise_if_dead()
        except EngineError as error:
            logger.warning("an engine starts SGLang from scratch: %s", error)
            return None
        return ForkAddress(node_address(), self._fork_server.socket_path)

    def wait_ready(self) -> dict[str, tuple[str, int]]:
        """Model name -> (host, port) of its router, once every engine is registered with its router."""
        args = self._args
        with self._naming_fork_server():
            for model in self._models:
                model.router.wait_ready()
                model.engines.wait_ready(args.engine_start_timeout + _START_GRACE_S)
                urls = ", ".join(engine.url for engine in model.engines.fleet().engines) or "none"
                about = "" if model.updates_weights else f" of {model.name}, whose weights stay"
                logger.info("router %s, engines%s %s", model.router.url, about, urls)
        for model in self._models:
            model.engines.watch(watch_settings(from_args(FaultToleranceArgs, args), args.engine_start_timeout))
        return {model.name: (model.router.host, model.router.port) for model in self._models}

    @contextmanager
    def _naming_fork_server(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # of any kind: a dead preloading process is the cause of all
            if self._fork_server is not None:
                self._fork_server.raise_if_dead()
            raise

    # ---------------------------------------------------------------- engines

    @property
    def _trained(self) -> list[ServedModel]:
        """The models that receive weights."""
        return [model for model in self._models if model.updates_weights]

    @property
    def fleet(self) -> RayEngineFleet:
        """The engines that receive weights: those that serve, and those that wait for weights."""
        return RayEngineFleet.joined(model.engines.fleet() for model in self._trained)

    def receivers(self) -> RayEngineFleet:
        """:attr:`fleet`, as a call for the driver."""
        return self.fleet

    def all_engines(self) -> RayEngineFleet:
        """Every living engine, also of models that keep their weights."""
        return RayEngineFleet.joined(model.engines.fleet() for model in self._models)

    def offloadable(self) -> RayEngineFleet:
        """The engines that share devices with the trainer."""
        fleet = self.all_engines()
        slots = [engine.first_slot for engine in fleet.engines]
        return fleet.only([i for i, slot in enumerate(slots) if slot is not None and slot < self._args.world_size])

    def waiting(self) -> WaitingEngines:
        """The engines that need weights. Raises when a router or an engine cannot be kept alive."""
        for model in self._models:
            if model.router.is_ours:
                model.router.raise_if_dead()
        states = {model.name: model.engines.waiting() for model in self._models}
        answers = [states[model.name] for model in self._trained]
        needy = [answer for answer in answers if answer.fleet.engines] or answers
        # The minimum over models, not the sum: the other models cannot generate for a model without serving engines.
        num_serving = min((answer.num_serving for answer in needy), default=0)
        return WaitingEngines(RayEngineFleet.joined(answer.fleet for answer in answers), num_serving)

    def note_progress(self) -> None:
        """Record that engines have generated something."""
        for model in self._models:
            model.engines.note_progress()

    def admit(self, names: Sequence[str]) -> None:
        """Let the waiting engines of these names serve: they have the weights of the others."""
        for model in self._trained:
            model.engines.admit(names)

    def pause_watch(self) -> None:
        """Pause health checks until :meth:`resume_watch`."""
        for model in self._models:
            model.engines.pause_watch()

    def resume_watch(self) -> None:
        for model in self._models:
            model.engines.resume_watch()

    def begin_sync(self) -> RayEngineFleet:
        """The engines that can take weights. Health checks pause until :meth:`end_sync`."""
        if self.awaits_engines:
            self._adopt()
        self.waiting()
        self.pause_watch()
        return self.fleet

    def end_sync(self, names: Sequence[str]) -> None:
        """Let the engines of these names serve: they have the new weights."""
        self.admit(names)
        # Engines that share devices are still without their KV cache: onload_kv() resumes their health checks.
        if not engines_share_devices(from_args(ClusterArgs, self._args)):
            self.resume_watch()

    def mark_dead(self, names: Sequence[str]) -> None:
        """Replace the engines of these names, which live but do not answer, if dead engines are replaced."""
        for model in self._models:
            model.engines.mark_dead(names)

    def lost(self, names: Sequence[str]) -> list[str]:
        """The engines of these names that are dead now."""
        for model in self._models:
            model.engines.look()
        alive = self.all_engines().names
        return [name for name in names if name not in alive]

    def raise_if_dead(self) -> None:
        """Raise the cause if a router is dead, or an engine that is not replaced."""
        for model in self._models:
            model.router.raise_if_dead()
            model.engines.raise_if_dead()

    def stop(self) -> None:
        """Stop engines, routers and the preloading process."""
        for model in self._models:
            # A router that continues would send requests to the stopped engines.
            model.engines.stop(leaves_router=model.registers and not model.router.is_ours)
            model.router.stop()
        self._models = []
        self._reserving.clear()  # devices that arrive now go back
        release_placement_groups({str(rank): gpus for rank, gpus in self._joined.items()})
        if self._fork_server is not None:
            self._fork_server.stop()


def watch_settings(health: FaultToleranceArgs, start_timeout_s: float) -> WatchSettings:
    """How the engines of a run are watched."""
    first_wait_s = health.rollout_health_check_first_wait
    later_wait_s = first_wait_s or 0.0
    if first_wait_s is None:
        # On a GPU the first batches compile kernels, during which an engine may answer nothing for minutes.
        first_wait_s = 0.0 if accelerator.current().is_cpu else _FIRST_WAIT_TIMEOUT_S
    return WatchSettings(
        interval_s=health.rollout_health_check_interval,
        timeout_s=health.rollout_health_check_timeout,
        first_wait_s=first_wait_s,
        later_wait_s=later_wait_s,
        start_timeout_s=start_timeout_s,
        replaces_dead=health.use_fault_tolerance,
    )
