"""``--background-eval``: an evaluation is begun, the run goes on, and new weights wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from slime.config.run_config import RunConfig
from slime.ray.run import loop


class Story(list[str]):
    """Writes down what is called."""

    def note(self, text: str, result: Any = None) -> Any:
        self.append(text)
        return result


def make_run(monkeypatch: pytest.MonkeyPatch, story: Story, *, background: bool) -> loop.Run:
    monkeypatch.setattr(loop, "get", lambda ref, *args, **kwargs: story.note(f"waited for {ref}", {"eval/a": 0.5}))
    run = object.__new__(loop.Run)
    vars(run).update({name: field.default for name, field in loop.Run.__dataclass_fields__.items()})
    flags = {"background_eval": background, "debug_train_only": False, "is_async": True}
    run.config = RunConfig(flags | {"rollout_timeout": 1.0, "weight_sync_timeout": 1.0})
    eval_remote = SimpleNamespace(
        remote=lambda rollout_id: story.note(f"eval {rollout_id} begins", f"eval {rollout_id}")
    )
    run.manager = SimpleNamespace(eval=eval_remote)
    run.tracker = SimpleNamespace(log=lambda metrics, step_key: story.note(f"logged at {metrics['eval/step']}"))
    run.progress = SimpleNamespace(update=lambda **values: None, phase=lambda *a: None)
    return run


def test_in_the_background_only_the_next_evaluation_or_new_weights_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    run = make_run(monkeypatch, story, background=True)
    evaluate = loop.Run.evaluate.__wrapped__
    assert evaluate(run, 4, 5) == {}
    story.note("the trainer works")
    evaluate(run, 6, 7)
    assert run.finish_evaluation() == {"eval/a": 0.5}
    assert run.finish_evaluation() == {}
    assert story == [
        *("eval 4 begins", "the trainer works", "waited for eval 4", "logged at 5"),
        *("eval 6 begins", "waited for eval 6", "logged at 7"),
    ]


def test_otherwise_an_evaluation_is_over_before_anything_else_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    run = make_run(monkeypatch, story, background=False)
    assert loop.Run.evaluate.__wrapped__(run, 4, 5) == {"eval/a": 0.5}
    assert story == ["eval 4 begins", "waited for eval 4", "logged at 5"]


def test_with_rollouts_ahead_an_evaluation_has_the_engines_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def engines_idle() -> Iterator[None]:
        story.note("engines idle")
        yield
        story.note("engines free")

    story = Story()
    run = make_run(monkeypatch, story, background=False)
    run._prefetched = SimpleNamespace(engines_idle=engines_idle)
    loop.Run.evaluate.__wrapped__(run, 4, 5)
    assert story == ["engines idle", "eval 4 begins", "waited for eval 4", "logged at 5", "engines free"]
