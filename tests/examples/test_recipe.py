"""The recipe that the offline examples share."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny.recipe import run_train


def test_a_run_shows_paths_from_the_directory_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nprint('in', os.getcwd())\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run_train("demo", [], script=str(script))
    assert f"in {tmp_path}\n" in capfd.readouterr().out
