"""``--background-eval``: an evaluation is begun, the run goes on, and new weights wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray.run import loop
from tests.unit.ray.runs import make_run


class Story(list[str]):
    """Records the calls."""

    def note(self, text: str, result: Any = None) -> Any:
        self.append(text)
        return result


def a_run(monkeypatch: pytest.MonkeyPatch, story: Story, *, background: bool) -> loop.Run:
    monkeypatch.setattr(loop, "get", lambda ref, *args, **kwargs: story.note(f"waited for {ref}", {"eval/a": 0.5}))
    eval_remote = SimpleNamespace(
        remote=lambda rollout_id: story.note(f"eval {rollout_id} begins", f"eval {rollout_id}")
    )
    tracker = SimpleNamespace(log=lambda metrics, step_key: story.note(f"logged at {metrics['eval/step']}"))
    return make_run(
        args={"background_eval": background, "is_async": True},
        manager=SimpleNamespace(eval=eval_remote),
        tracker=tracker,
    )


def test_in_the_background_only_the_next_evaluation_or_new_weights_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    run = a_run(monkeypatch, story, background=True)
    assert run.evaluate(4, 5) == {}
    story.note("the trainer works")
    run.evaluate(6, 7)
    assert run.finish_evaluation() == {"eval/a": 0.5}
    assert run.finish_evaluation() == {}
    assert story == [
        *("eval 4 begins", "the trainer works", "waited for eval 4", "logged at 5"),
        *("eval 6 begins", "waited for eval 6", "logged at 7"),
    ]


def test_an_evaluation_by_newer_weights_is_logged_as_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    run = a_run(monkeypatch, story, background=True)
    monkeypatch.setattr(loop, "get", lambda *args, **kwargs: {"eval/weight_version": 6.0})
    run.evaluate(4, 5)
    run.finish_evaluation()
    assert story == ["eval 4 begins", "logged at 6"], "all engines were lost, and got the trainer's weights"


def test_otherwise_an_evaluation_is_over_before_anything_else_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    run = a_run(monkeypatch, story, background=False)
    assert run.evaluate(4, 5) == {"eval/a": 0.5}
    assert story == ["eval 4 begins", "waited for eval 4", "logged at 5"]


def test_with_rollouts_ahead_an_evaluation_has_the_engines_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def engines_idle() -> Iterator[None]:
        story.note("engines idle")
        yield
        story.note("engines free")

    story = Story()
    run = a_run(monkeypatch, story, background=False)
    run._prefetched = SimpleNamespace(engines_idle=engines_idle)
    run.evaluate(4, 5)
    assert story == ["engines idle", "eval 4 begins", "waited for eval 4", "logged at 5", "engines free"]
