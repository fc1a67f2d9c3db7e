"""Small rules of the wiring room that need no cluster."""

from __future__ import annotations

import pytest

from slime.ray.run.loop import is_due
from slime.ray.run.restart import exit_status
from slime.ray.watch.failure_report import message_of
from slime.utils.errors import ConfigError, EngineError


@pytest.mark.parametrize(
    ("rollout_id", "interval", "last", "due"),
    [(0, None, 0, False), (0, 2, 9, False), (1, 2, 9, True), (9, 4, 9, True), (9, 4, None, False), (0, 1, None, True)],
)
def test_periodic_actions_follow_the_interval_and_the_last_rollout(rollout_id, interval, last, due):
    assert is_due(rollout_id, interval, last) is due


def test_an_error_raised_on_purpose_in_an_actor_is_shown_without_rays_traceback():
    from ray.exceptions import RayTaskError

    wrapped = RayTaskError("generate", "Traceback ...", EngineError("engine 0 died"))
    assert message_of(wrapped) == "engine 0 died"
    assert message_of(wrapped.as_instanceof_cause()) == "engine 0 died"


def test_a_bug_keeps_its_traceback():
    assert message_of(KeyError("x")) is None


def test_expected_errors_end_the_process_with_status_1(capsys):
    with pytest.raises(SystemExit) as caught, exit_status():
        raise ConfigError("--flag 3 must be 4")
    assert caught.value.code == 1
    assert capsys.readouterr().err.strip().endswith("error: --flag 3 must be 4")
