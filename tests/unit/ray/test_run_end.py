"""The end of a run: checkpoints that are still being written count, if the ranks that write them live."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray.run import loop
from slime.utils.errors import DataError, ProcessDied
from tests.unit.ray.runs import NoProgress, make_run


def _end(
    monkeypatch: pytest.MonkeyPatch,
    *,
    async_save: bool = True,
    death: Exception | None = None,
    error: BaseException | None = None,
) -> list[str]:
    """The calls of a run that ends with ``error``, by default one of slime's."""
    story: list[str] = []

    def look(actors: Any, what: str) -> None:
        if death is not None:
            raise death

    monkeypatch.setattr(loop, "raise_if_dead", look)
    monkeypatch.setattr(loop.RunHandles, "dispose", lambda self: story.append("disposed"))
    trainer = SimpleNamespace(ranks=[], finish_saves=lambda seconds: story.append("saved"))
    run = make_run(args={"async_save": async_save}, trainer=trainer, progress=NoProgress(story))
    error = error or DataError("a reward failed")
    with pytest.raises(type(error)), run:
        raise error
    return story


def test_a_checkpoint_in_the_background_is_completed_before_the_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _end(monkeypatch) == ["failed", "saved", "disposed"]
    assert _end(monkeypatch, async_save=False) == ["failed", "disposed"]


def test_without_a_rank_that_it_needs_it_is_given_up_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _end(monkeypatch, death=ProcessDied("trainer rank 1 died")) == ["failed", "disposed"]
    assert "the checkpoint that was being written does not count: trainer rank 1 died" in caplog.text


def test_a_run_that_is_stopped_by_ctrl_c_is_not_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _end(monkeypatch, error=KeyboardInterrupt()) == ["interrupted", "saved", "disposed"]
