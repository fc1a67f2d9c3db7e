"""A started run without processes, for tests of the loop."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from slime.backends import EngineInfo
from slime.config.groups import RunConfig
from slime.ray.engines.fleet import RayEngineFleet, WaitingEngines
from slime.ray.engines.recovery import RemoteEngines
from slime.ray.run.device_handoff import DeviceHandoff
from slime.ray.run.loop import Run, RunHandles


class NoProgress:
    """A progress file that is not written. ``states`` collects the states of the run."""

    def __init__(self, states: list[str] | None = None) -> None:
        self.states = states if states is not None else []

    def update(self, **facts: Any) -> None:
        self.states += [facts["state"]] if "state" in facts else []

    def lanes(self) -> list[dict[str, Any]]:
        return []

    @contextmanager
    def phase(self, *lane: Any) -> Iterator[None]:
        yield


def fleet(*names: str, slots: tuple[int | None, ...] = ()) -> RayEngineFleet:
    infos = [EngineInfo(f"http://{n}", 1, s) for n, s in zip(names, slots or (None,) * len(names), strict=True)]
    return RayEngineFleet(names, infos, names)


class Engines(RemoteEngines):
    """The manager's engines, which record the calls in ``diary``.

    Attributes:
        waiting, lost: answers, changed by a test.
        fleets: answers to ``begin_sync``. The last one is repeated.
    """

    def __init__(self) -> None:
        self.waiting = WaitingEngines(fleet(), 1)
        self.fleets = [fleet("0.0", "1.0")]
        self.lost: list[str] = []
        self.diary: list[tuple[Any, ...]] = []

    def call(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        name = method.__name__
        self.diary.append((name, *arguments))
        match name:
            case "waiting":
                return self.waiting
            case "begin_sync":
                return self.fleets.pop(0) if len(self.fleets) > 1 else self.fleets[0]
            case "lost":
                return self.lost
            case "admit":
                self.waiting = WaitingEngines(fleet(), 1)
            case "mark_dead":
                self.lost = [*self.lost, *arguments[0]]
            case "end_sync":
                pass
            case _:
                raise AssertionError(name)

    def calls_of(self, name: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.diary if entry[0] == name]


def make_run(
    *,
    trainer: Any = None,
    critic: Any = None,
    engines: Any = None,
    handoff: DeviceHandoff | None = None,
    rollout_ids: range = range(9),
    rollouts_per_epoch: int | None = None,
    has_journal: bool = False,
    args: dict[str, Any] | None = None,
    **handles: Any,
) -> Run:
    """A run of fakes. ``args`` are arguments by name, ``handles`` fields of RunHandles."""
    seconds = dict.fromkeys(("rollout_timeout", "engine_start_timeout", "weight_sync_timeout"), 5.0)
    defaults: dict[str, Any] = {
        "tracker": SimpleNamespace(log=lambda *a, **k: None, close=lambda: None, directory=None),
        "manager": None,
        "data_buffer": SimpleNamespace(kill=lambda: None, trained=lambda rollout_id: None, actor=None),
        "progress": NoProgress(),
        "trainers": [group for group in (trainer, critic) if group is not None],
    }
    return Run(
        config=RunConfig.of(Namespace(**{**seconds, **(args or {})})),
        handles=RunHandles(**{**defaults, **handles}),
        rollout_ids=rollout_ids,
        rollouts_per_epoch=rollouts_per_epoch,
        engines=engines,
        takes_weights=engines is not None,
        has_journal=has_journal,
        trainer=trainer,
        critic=critic,
        handoff=handoff or DeviceHandoff(),
    )
