"""Calls to several engines at once: who did not answer is named."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from slime.backends import EngineInfo
from slime.ray.engines import fleet as fleet_module
from slime.ray.engines.fleet import RayCalls, RayEngineFleet, silent_engines
from slime.utils.errors import DeadlineExceeded, EngineError, EngineSilent

_ENGINES = [EngineInfo(f"http://{name}", 1) for name in "abc"]


class Asked(DeadlineExceeded):
    """As Ray raises it: an instance of the engine's error class and of Ray's error class."""


@pytest.mark.parametrize("error", [DeadlineExceeded("gave up after 5 s"), Asked("the lock"), EngineError("no")])
def test_engines_that_did_not_answer_in_time_are_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(fleet_module, "get", fail)
    monkeypatch.setattr(fleet_module.ray, "wait", lambda refs, **_: ([refs[0]], refs[1:]))
    calls = RayCalls(["r0", "r1", "r2"], "flush_cache", [engine.url for engine in _ENGINES])
    with pytest.raises(type(error)) as raised:
        calls.wait(120)
    is_ours = type(error) is DeadlineExceeded
    assert str(raised.value) == str(error) + (" No answer from: http://b, http://c." if is_ours else "")


@pytest.mark.parametrize("names", [("0.0", "1.0", "2.0"), ()])
def test_a_part_of_a_fleet_keeps_handles_engines_and_names_together(names: tuple[str, ...]) -> None:
    part = RayEngineFleet(["x", "y", "z"], _ENGINES, names).only([2, 0])
    assert list(part.handles) == ["z", "x"]
    assert [engine.url for engine in part.engines] == ["http://c", "http://a"]
    assert list(part.names) == (["2.0", "0.0"] if names else [])


def test_silent_engines_are_found_in_an_error_that_came_through_two_processes() -> None:
    fleet = RayEngineFleet(["x", "y", "z"], _ENGINES, ("0.0", "1.0", "2.1"))
    silent = pickle.loads(pickle.dumps(EngineSilent("no answer", ["http://c"])))
    in_trainer = RayTaskError("engine", "traceback", silent)
    in_driver = RayTaskError("trainer", "traceback", in_trainer)
    for error in (silent, in_trainer, in_driver, in_driver.as_instanceof_cause()):
        assert silent_engines(error, fleet) == ["2.1"]
    assert silent_engines(EngineError("refused"), fleet) == []
