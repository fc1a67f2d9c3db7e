"""Commands of the pages that train for minutes run up to the start of ``train.py``, and on from its end.

In between is a check: the flags must be those of a run that would start. The outputs of the run are put there. The
examples' own commands are tried in the same way in ``tests/examples/test_readmes.py``.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import algorithm_curves
from slime.ray.arguments import parse_only
from tests.doc_commands import census

COMMANDS = [command.text for command, executed in census().items() if executed == "up to training"]
CURVES = [text for text in COMMANDS if "algorithm_curves.py" in text]
METRICS = ("eval/addition", "rollout/raw_reward", "train/train_rollout_logprob_abs_diff", "train/loss")
METRICS += ("train/critic-value_loss", "train/opd_reverse_kl")


class Training:
    """In the place of ``run_train``: would it start?"""

    def __init__(self) -> None:
        self.started: list[str] = []

    def __call__(self, title: str, flags: Sequence[Any]) -> None:
        args, problems = parse_only([str(flag) for flag in flags])
        assert problems == []
        assert args is not None
        self.started.append(title)
        if args.save_hf:
            shutil.copytree(args.hf_checkpoint, str(args.save_hf).format(rollout_id=args.num_rollout - 1))
        folder = Path(args.save)
        (folder / "iter_0000000").mkdir(parents=True)
        (folder / "iter_0000000" / "metadata.json").write_text("{}")
        (folder / "latest_checkpointed_iteration.txt").write_text("0")


def learned(output: Path, name: str) -> list[dict[str, Any]]:
    """The metrics of a run of two steps."""
    axes = ("eval/step", "rollout/step", "train/step")
    return [dict.fromkeys(METRICS, float(step + 1)) | dict.fromkeys(axes, step) for step in range(2)]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Training:
    """The program with the replacement, in an empty folder."""
    made = Training()
    monkeypatch.setattr(algorithm_curves, "run_train", made)
    monkeypatch.setattr(algorithm_curves, "read_metrics", learned)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.mark.parametrize("command", CURVES)
def test_a_curve_is_made_of_runs_that_would_start(
    command: str, training: Training, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages = tmp_path / "algorithms"
    shutil.copytree(algorithm_curves.RECORD.parent, pages, ignore=shutil.ignore_patterns("*.jsonl"))
    record = pages / "curves.jsonl"
    load, add = algorithm_curves.load_record, algorithm_curves.add_to_record
    monkeypatch.setattr(algorithm_curves, "load_record", lambda path=record: load(path))
    monkeypatch.setattr(algorithm_curves, "add_to_record", lambda line: add(line, record))
    monkeypatch.setattr(algorithm_curves, "RECORD", record)
    monkeypatch.setattr(algorithm_curves, "PICTURES", tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
    algorithm_curves.main()
    named = [word for word in sys.argv[1:] if word in algorithm_curves.ALGORITHMS] or list(algorithm_curves.ALGORITHMS)
    titles = [algorithm_curves.ALGORITHMS[name].title for name in named]
    assert training.started == ["supervised warm start", *titles]
    for name in named:
        assert (tmp_path / f"{name}.png").is_file()
        assert "1.000 → 2.000" in (pages / f"{algorithm_curves.ALGORITHMS[name].page}.md").read_text()


def test_no_long_command_is_left_out() -> None:
    of_examples = [text for text in COMMANDS if "/run_tiny.py" in text]
    assert set(COMMANDS) == {*CURVES, *of_examples}
    assert {text.split()[1].split("/")[1] for text in of_examples} >= {"search-r1", "retool"}
