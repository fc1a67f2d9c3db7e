"""``slime new``: the folder that it writes, its tests, and the commands of its script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slime.cli import main
from slime.new import template_files
from slime.new.task.test_task import *  # noqa: F403  (the tests of the template are tests of this suite)
from slime.observability.console import shown_path
from slime.observability.tracking import run_directory
from slime.ray.arguments import parse_only
from tests.doc_commands import make_model

RECORDER = '#!/usr/bin/env bash\nprintf "%s\\n" "---" "$@" >> "$RECORD"\n'


def test_the_folder_has_every_file_with_the_name_of_the_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "largest-digit"
    assert main(["new", str(folder)]) == 0
    assert f"bash {folder}/run.sh" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [path.name for path in template_files()]
    texts = "".join(path.read_text() for path in folder.iterdir())
    assert "my_task" not in texts
    assert "slime board outputs/largest-digit" in texts


@pytest.mark.parametrize("name", [".hidden", "-x y", "a b", "é!"])
def test_a_name_that_a_flag_or_file_cannot_have_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(tmp_path / name)]) == 2
    assert "the name must begin with a letter" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_user_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "reward.py").write_text("mine")
    (tmp_path / "file").write_text("mine")
    assert main(["new", str(tmp_path / "task")]) == main(["new", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert "none is replaced" in err
    assert "it is a file" in err
    assert [path.read_text() for path in (tmp_path / "task").iterdir()] == ["mine"]


def test_the_commands_of_the_script_have_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "largest"
    assert main(["new", str(folder)]) == 0
    record, python = tmp_path / "words", tmp_path / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python), "RECORD": str(record), "ROLLOUTS": "2"}
    subprocess.run(["bash", str(folder / "run.sh"), "--experiment-name", "short"], env=env, check=True, cwd=tmp_path)
    data, *commands = (part.split("\n")[1:-1] for part in record.read_text().split("---")[1:])
    assert data == [str(folder / "data.py")]
    assert [words[:3] for words in commands] == [["-m", "slime", "train"]] * 2
    make_model(folder / "data" / "model")
    for name in ("train", "eval", "warm_start"):
        (folder / "data" / f"{name}.jsonl").write_text('{"prompt": [{"role": "user", "content": "1"}], "label": "1"}\n')
    monkeypatch.chdir(tmp_path)
    for words, export in zip(commands, ("warm_start", "hf"), strict=True):
        args, problems = parse_only(words[3:])
        assert problems == []
        assert args is not None
        assert not [notice for notice in args.notices if notice.text.startswith("unknown flag")]
        make_model(folder / "data" / export)
    assert (args.num_rollout, args.experiment_name) == (2, "short")
    assert shown_path(run_directory(args)) == "largest/outputs/short"
