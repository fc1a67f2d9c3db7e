"""The process-wide timer of plugins."""

from __future__ import annotations

import pytest

from slime.compat.measures import Timer


@pytest.fixture(autouse=True)
def fresh_timer():
    Timer.clear_instances()
    yield
    Timer.clear_instances()


def test_a_timer_adds_up_and_starts_from_zero_after_a_report() -> None:
    timer = Timer()
    timer.add("train", 1.5)
    timer.add("train", 0.5)
    with pytest.raises(RuntimeError), timer("sync"):
        raise RuntimeError
    seconds = timer.pop()
    assert seconds["train"] == 2.0
    assert 0 <= seconds["sync"] < 1
    assert timer.pop() == {}
    timer.start("a")
    with pytest.raises(AssertionError, match="already running"):
        timer.start("a")
