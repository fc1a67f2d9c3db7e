"""Small rules of the wiring room that need no cluster."""

from __future__ import annotations

import socket
from argparse import Namespace

import pytest

from slime.ray import rules
from slime.ray.run.restart import exit_status
from slime.ray.watch.failure_report import message_of
from slime.utils.errors import ConfigError, EngineError


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


def test_a_cluster_on_this_machine_that_the_run_would_not_use_is_a_warning(tmp_path, monkeypatch):
    def notes() -> list[str]:
        args = Namespace(notices=[])
        assert list(rules._other_cluster(args)) == []
        return [str(notice) for notice in args.notices]

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert rules._other_cluster in rules.MACHINE_RULES
    assert notes() == []
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        (text,) = notes()
        assert text.startswith(f"RAY_ADDRESS: not set, but a Ray cluster runs on this machine at {address}")
        assert f"Set RAY_ADDRESS={address} to use the cluster" in text
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert notes() == []
        monkeypatch.delenv("RAY_ADDRESS")
    assert notes() == []  # the cluster has crashed, and its file is left
    (tmp_path / "ray" / "ray_current_cluster").write_text("nonsense")
    assert notes() == []
