"""The folder that ``slime new`` writes learns its task by the command in it, and Python reads its record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import slime
from slime.cli import main
from tests.e2e.running import environment


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_folder_of_a_new_task_learns(tmp_path: Path) -> None:
    folder = tmp_path / "my_task"
    assert main(["new", str(folder)]) == 0
    env = environment(PYTHON=sys.executable, ROLLOUTS="10")
    command = ["bash", "my_task/run.sh"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "board: slime board my_task/outputs/my_task" in done.stdout
    run = slime.load_run(folder / "outputs" / "my_task")
    assert run.info.driver == "train.py"
    assert run.config["num_rollout"] == 10
    before, after = (row["eval/my_task"] for row in run.metric_rows() if "eval/my_task" in row)
    assert after > before + 0.05
    samples = [row for row in run.sample_rows() if row["kind"] == "rollout"]
    assert {row["reward"] for row in samples} == {0.0, 0.5, 1.0}
    assert any("\nno" in row["response"] for row in samples)
