"""Fault schedules: which faults of a run happen at which of its events.

A fault is bound to the number of an event, not to a time: so faults hit short moments, such as the one between two
operations on files, as often as long ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.world import Process, World

_EVENTS = 650  # usual number of events of a run without faults
_TARGETS = ("driver", "manager", "buffer", "trainer", "engine", "server", "router")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at: number of the event.
        kind: of :data:`KINDS`.
        target: a process name without its number, if the kind needs one.
        seconds: duration, if it has one.
    """

    at: int
    kind: str
    target: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"event {self.at}: {self.kind} {self.target} {f'{self.seconds:.1f} s' if self.seconds else ''}".rstrip()


def _alive(here: World, target: str) -> list[Process]:
    return [p for p in here.processes if p.name.startswith(target) and not p.is_dead]


def _kill(here: World, fault: Fault) -> None:
    found = _alive(here, fault.target)
    if found:
        here.kill(here.random.choice(found))


def _pause(here: World, fault: Fault) -> None:
    found = _alive(here, fault.target)
    if found:
        here.pause(here.random.choice(found), fault.seconds)


def _preempt(here: World, fault: Fault) -> None:
    servers = here.globals["network"].servers.values()
    found = [server for server in servers if server.process.name.startswith("server") and not server.process.is_dead]
    if found:
        here.random.choice(found).preempt(fault.seconds)


def _cut(here: World, fault: Fault) -> None:
    network = here.globals["network"]
    for process in _alive(here, fault.target)[-1:]:
        network.is_cut_until[process] = here.now + fault.seconds


def _bad_network(here: World, fault: Fault) -> None:
    network = here.globals["network"]
    network.loss, network.duplicates = 0.2, 0.2

    def heal() -> None:
        network.loss = network.duplicates = 0.0

    here.at(fault.seconds, heal)


def _slow_network(here: World, fault: Fault) -> None:
    network = here.globals["network"]
    network.extra_delay_s = 3.0

    def heal() -> None:
        network.extra_delay_s = 0.0

    here.at(fault.seconds, heal)


def _full_disk(here: World, fault: Fault) -> None:
    here.globals["disk"].full_until = here.now + fault.seconds


def _slow_disk(here: World, fault: Fault) -> None:
    here.globals["disk"].slow_until = here.now + fault.seconds


def _engines_change(here: World, fault: Fault) -> None:
    """An operator asks for another number of engines, at the port of the driver."""
    port = here.globals.get("engine port")
    if port is not None and not port.process.is_dead:
        count = here.random.randrange(1, 4)
        here.spawn("operator's request", lambda: port.resize(count), port.process)


def _power(here: World, fault: Fault) -> None:
    for process in _alive(here, ""):
        if process is not here.main.process:
            here.kill(process)
    here.globals["disk"].lose_power()


KINDS: dict[str, Callable[[World, Fault], None]] = {
    "kill": _kill,
    "pause": _pause,
    "preemption": _preempt,
    "engines join or leave": _engines_change,
    "partition": _cut,
    "lost and duplicated messages": _bad_network,
    "slow network": _slow_network,
    "full disk": _full_disk,
    "slow disk": _slow_disk,
    "power failure": _power,
}
_WEIGHTS = (8, 3, 2, 3, 2, 2, 1, 2, 1, 1)


def schedule(here: World) -> list[Fault]:
    """The faults of a world, from its seed: one to four, half of them close to the one before."""
    chance = here.random
    faults: list[Fault] = []
    for number in range(chance.choice((1, 1, 2, 2, 3, 4))):
        near = number > 0 and chance.random() < 0.5
        at = faults[-1].at + chance.randrange(1, 12) if near else chance.randrange(1, _EVENTS)
        kind = chance.choices(list(KINDS), _WEIGHTS)[0]
        targets = (
            _TARGETS if kind in ("kill", "pause") else ("server", "engine", "router") if kind == "partition" else ()
        )
        target = chance.choice(targets) if targets else ""
        faults.append(Fault(at, kind, target, round(chance.uniform(0.5, 40.0) ** 1.0, 3) if kind != "kill" else 0.0))
    return sorted(faults, key=lambda fault: fault.at)
