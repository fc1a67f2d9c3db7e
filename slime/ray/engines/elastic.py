"""Engines that join and leave while the run goes on.

join     devices are reserved, or the address of a server is checked -> the server starts -> it gets the weights of the
         others, while these go on -> it is registered at the router
leave    see ``EngineSlots.leave``

An engine that joined gives its devices back to Ray when it leaves. Those of the start of the run stay reserved, and
the next engine that joins uses them.
"""

from __future__ import annotations

import logging
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from slime.backends.sglang_utils.external import ExternalEngineInfo, discover_external_engines, problems_of
from slime.backends.sglang_utils.router import Router
from slime.backends.sglang_utils.topology import EnginePlace, WorkerType
from slime.ray.engines.slot import text_of
from slime.utils.errors import ConfigError, EngineError, SlimeError

if TYPE_CHECKING:
    from slime.ray.engines.slots import EngineSlots

logger = logging.getLogger(__name__)

_JOINING = "the engine that joins"
_MOST_ENGINES = 10_000  # a typing error would otherwise fill the memory of the rollout manager


@dataclass(frozen=True)
class ServedModel:
    """The router and the engines of one model.

    Attributes:
        updates_weights: False for a model that keeps the weights it was started with.
        registers: its engines were registered by this run. An existing router must forget them at the end.
        ranks: its engines of the start that this run has placed.
        may_grow: engines like the first of ``ranks`` may join.
    """

    name: str
    router: Router
    engines: EngineSlots
    updates_weights: bool
    registers: bool = True
    ranks: tuple[int, ...] = ()
    may_grow: bool = False


class ElasticEngines:
    """The part of :class:`RolloutServers` that changes its engines. All methods return at once.

    Attributes:
        _places: number of an engine of this run -> its place, also after it has left.
        _external: number of an engine that others run -> its properties.
        _joined: number of an engine that joined -> its devices.
        _reserving: engines that wait for devices. One that is taken out gives up.
        _changing: guards the fields above, which threads of engines that join and leave change.
        _check_room, _reserve_engine, _release: functions of ``placement_group``.
    """

    _args: Namespace
    _gpus: Any
    _models: list[ServedModel]
    _places: dict[int, EnginePlace]
    _external: dict[int, ExternalEngineInfo]
    _joined: dict[int, Any]
    _reserving: set[int]
    _changing: threading.RLock
    _check_room: Callable[[int], None]
    _reserve_engine: Callable[[int, float], Any]
    _release: Callable[[dict[str, Any]], None]

    def engine_states(self) -> list[dict[str, Any]]:
        """Number, model, state and address of each engine."""
        found = [
            {"engine": rank, "model": model.name, "state": state, "url": url}
            for model in self._models
            for rank, (state, url) in model.engines.states().items()
        ]
        first = self._models[0].name
        with self._changing:
            waiting = list(self._reserving)
        found += [{"engine": rank, "model": first, "state": "waits for devices", "url": None} for rank in waiting]
        return sorted(found, key=lambda engine: engine["engine"])

    def resize(self, count: int) -> None:
        """Let engines join or leave until the first model has ``count``.

        Raises:
            EngineError: this model cannot change its engines, or has too few that serve.
            ConfigError: the cluster has too few devices.
        """
        if not 1 <= count <= _MOST_ENGINES:
            raise EngineError(f"count {count}: a run needs one engine at least, and {_MOST_ENGINES} at most.")
        with self._changing:
            self._resize(self._models[0], count)
            self._note_number()

    def _resize(self, model: ServedModel, count: int) -> None:
        # Engines that leave do not count: their number would be subtracted twice.
        states = {
            rank: state for rank, (state, _) in model.engines.states().items() if state not in ("leaving", "draining")
        }
        num_more = count - len(states) - len(self._reserving)
        if num_more > 0:
            self._grow(model, num_more)
            return
        # Those that joined last leave first: they give devices back. Before them, those that only wait for devices.
        last_first = sorted(self._reserving, reverse=True)
        give_up = last_first[:-num_more]
        num_leaving = -num_more - len(give_up)
        ready = sorted((rank for rank, state in states.items() if state in ("serving", "waiting")), reverse=True)
        if num_leaving > len(ready):
            raise EngineError(
                f"count {count}: {num_leaving} engines would leave, and {len(ready)} have started. Ask later."
            )
        self._reserving -= set(give_up)
        for rank in ready[:num_leaving]:
            self.leave_engine(rank, f"the run goes on with {count} engines")

    def leave_engine(self, rank: int, reason: str = "it was asked to leave") -> None:
        """Let one engine leave. Raises EngineError if it does not serve, or is the last one that does."""
        model = next((model for model in self._models if rank in model.engines.states()), None)
        if model is None:
            known = ", ".join(str(engine["engine"]) for engine in self.engine_states())
            raise EngineError(f"there is no engine {rank}. The engines are {known}.")
        model.engines.leave(rank, reason)

    def join_address(self, address: str) -> None:
        """Let the server at ``address`` join the first model. It is not replaced if it dies.

        Raises:
            ConfigError: the address is malformed, known already, does not answer, or the server does not fit the run.
        """
        model = self._models[0]
        found = discover_external_engines([address], source=_JOINING)
        problems = [text for info in found for text in problems_of(info, self._args, source=_JOINING)]
        problems += [
            f"{_JOINING} {info.url}: it is engine {engine['engine']} of this run already."
            for info in found
            for engine in self.engine_states()
            if engine["url"] == info.url
        ]
        if found[0].worker_type != WorkerType.REGULAR:
            problems.append(f"{_JOINING} {found[0].url}: it is a {found[0].worker_type} engine, only regular ones can.")
        if any(self._kind_of(rank) != WorkerType.REGULAR for rank in model.engines.states()):
            problems.append(f"{_JOINING} {found[0].url}: model {model.name} has prefill engines.")
        if not model.registers:
            problems.append(f"{_JOINING} {found[0].url}: register it with the router {model.router.url} of this run.")
        if problems:
            raise ConfigError(problems)
        with self._changing:
            # Before join(), whose thread makes the actor from it.
            rank = self._next_rank()
            self._external[rank] = found[0]
            model.engines.join(rank, is_guest=True)
            self._note_number()

    def _grow(self, model: ServedModel, number: int) -> None:
        if not model.may_grow:
            raise EngineError(
                f"model {model.name}: only regular engines that this run started can join by a count. Give an address."
            )
        template = self._places[model.ranks[0]]
        if template.num_gpus > self._args.num_gpus_per_node:
            raise EngineError(
                f"model {model.name}: an engine of several nodes ({template.num_gpus} devices) cannot join."
            )
        states = model.engines.states()
        back = [rank for rank in model.ranks if rank not in states][:number]
        self._check_room((number - len(back)) * template.num_gpus)
        new = []
        for _ in range(number - len(back)):
            rank = self._next_rank()
            # Beyond all devices of the start: no weight transfer takes them for devices of the trainer.
            slot = max(place.first_slot + place.num_gpus for place in self._places.values())
            self._places[rank] = replace(template, rank=rank, first_slot=max(slot, len(self._gpus)))
            self._reserving.add(rank)
            new.append(rank)
        # These need no reservation: the run has kept their devices.
        for rank in back:
            model.engines.join(rank)
        if new:
            threading.Thread(target=self._join_new, args=(model, new), name="devices for engines", daemon=True).start()

    def _join_new(self, model: ServedModel, ranks: Sequence[int]) -> None:
        """Reserve devices for engines, one after the other, and start them. Body of a thread."""
        for rank in ranks:
            gpus = None
            try:
                if rank in self._reserving:
                    gpus = self._reserve_engine(self._places[rank].num_gpus, self._args.placement_timeout)
            except (RayError, SlimeError) as error:  # the engines before it go on
                logger.warning("engine %d cannot join: %s", rank, text_of(error))
            with self._changing:
                if gpus is not None and rank in self._reserving:
                    self._joined[rank] = gpus
                    model.engines.join(rank)
                else:
                    if gpus is not None:
                        self._release({"joined": gpus})
                    # Otherwise the number of the next engine would skip this one.
                    del self._places[rank]
                self._reserving.discard(rank)
                self._note_number()

    def _kind_of(self, rank: int) -> str:
        """``regular``, ``prefill`` or ``decode``."""
        known = self._places.get(rank) or self._external.get(rank)
        return str(known.worker_type) if known is not None else WorkerType.REGULAR

    def _next_rank(self) -> int:
        return max([*self._places, *self._external], default=-1) + 1

    def _on_gone(self, rank: int) -> None:
        """Give the devices of an engine that has left back to Ray."""
        with self._changing:
            self._external.pop(rank, None)
            if (gpus := self._joined.pop(rank, None)) is not None:
                self._release({"joined": gpus})
                del self._places[rank]
            self._note_number()

    def _note_number(self) -> None:
        # A fact that requests read: their number in flight grows with the number of engines.
        first = self._models[:1]  # none after stop()
        number = sum(len(model.engines.states()) for model in first) + len(self._reserving)
        vars(self._args)["rollout_num_engines"] = max(1, number)
