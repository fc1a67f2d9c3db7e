"""``slime.train``, ``slime.load_run`` and their names, without a run."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.api import RunRecord, command_line
from slime.config.groups import Notice
from slime.data.sample import Sample
from slime.observability.run_info import write_run_info
from slime.observability.sample_record import record_rollout
from slime.ray import arguments
from slime.ray.run import main
from slime.rollout.rm_hub import async_rm
from slime.utils.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lr": 1e-5, "num_rollout": 3}, ["--lr=1e-05", "--num-rollout=3"]),
        ({"colocate": True, "fp32": False, "load": None}, ["--colocate"]),
        ({"offload_train": False}, ["--no-offload-train"]),
        ({"rewards_normalization": False}, ["--disable-rewards-normalization"]),
        ({"rewards_normalization": True}, []),
        ({"eval_prompt_data": ["sums", Path("eval.jsonl")]}, ["--eval-prompt-data", "sums", "eval.jsonl"]),
        ({"train_env_vars": {"A": "1"}}, ['--train-env-vars={"A": "1"}']),
        ({"sglang_context_length": 256}, ["--sglang-context-length=256"]),
        ({"sglang_enable_metrics": True}, ["--sglang-enable-metrics"]),
        ({"custom_rm_path": async_rm}, ["--custom-rm-path=slime.rollout.rm_hub:async_rm"]),
    ],
)
def test_keyword_arguments_are_flags(flags: dict[str, Any], words: list[str]) -> None:
    assert command_line(flags) == words


def test_a_misspelt_keyword_gets_a_hint() -> None:
    with pytest.raises(TypeError, match="num_rollouts is not a flag of slime; did you mean num_rollout"):
        slime.train(num_rollouts=3)


def test_a_function_that_other_processes_cannot_load_is_refused() -> None:
    with pytest.raises(TypeError, match=r"--custom-rm-path: .*<lambda> .*file\.py"):
        command_line({"custom_rm_path": lambda args, sample: 0.0})


def test_problems_with_the_flags_are_one_error() -> None:
    with pytest.raises(ConfigError, match="--hf-checkpoint is required") as caught:
        slime.train_async(num_rollout=1, colocate=True)
    assert len(caught.value.problems) > 1


def test_the_package_imports_neither_engines_nor_its_interface() -> None:
    code = (
        "import sys, slime\n"
        "heavy = {'torch', 'ray', 'numpy', 'pandas', 'pyarrow', 'transformers', 'slime.api'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "slime.load_run, slime.train\n"
        "heavy = {'torch', 'ray', 'pandas', 'pyarrow', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_that_the_package_lacks_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        slime.trian  # noqa: B018


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    """A run of two rollouts, the second of them twice, and one evaluation."""
    write_run_info(tmp_path, {"hf_checkpoint": "model", "lr": 0.5, "command_line": ["train.py", "--lr", "0.5"]})
    records = [
        {"step_key": "rollout/step", "rollout/step": 0, "rollout/raw_reward": 0.25, "time": 1.0},
        {"step_key": "rollout/step", "rollout/step": 1, "rollout/raw_reward": 0.4, "time": 2.0},
        {"step_key": "train/step", "train/step": 0, "train/loss": -0.5, "time": 2.0},
        {"step_key": "rollout/step", "rollout/step": 1, "rollout/raw_reward": 0.5, "time": 3.0},
        {"step_key": "eval/step", "eval/step": 2, "eval/sums": 0.75, "time": 4.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"cut')
    for kind in ("rollout", "eval"):
        sample = Sample(prompt="1+1=", response="2", label="2", reward=1.0, tokens=[1, 2], response_length=1)
        record_rollout(tmp_path, [sample], rollout_id=1, limit=1, reward_key=None, kind=kind)
    return slime.load_run(tmp_path)


def test_the_record_of_a_run_is_read(run: RunRecord) -> None:
    assert run.config["lr"] == 0.5
    assert (run.info.driver, run.info.argv) == ("train.py", ["--lr", "0.5"])
    rows = run.metric_rows()
    assert [(row["step_key"], row["step"]) for row in rows] == [
        ("rollout/step", 0),
        ("rollout/step", 1),
        ("train/step", 0),
        ("eval/step", 2),
    ]
    assert rows[1]["rollout/raw_reward"] == 0.5
    samples = list(run.sample_rows())
    assert [(row["kind"], row["rollout"]) for row in samples] == [("eval", 1), ("rollout", 1)]
    kept = {name: samples[1][name] for name in ("prompt", "response", "label", "reward", "response_length")}
    assert kept == {"prompt": "1+1=", "response": "2", "label": "2", "reward": 1.0, "response_length": 1}


def test_data_frames_have_a_row_per_step_and_per_sample(run: RunRecord) -> None:
    # Not in the CPU set: 84 MB, and pyarrow imports it with the first table of every process if it is installed.
    pytest.importorskip("pandas")
    assert run.metrics["rollout/raw_reward"].dropna().to_dict() == {0: 0.25, 1: 0.5}
    assert run.samples.groupby("kind")["reward"].mean().to_dict() == {"eval": 1.0, "rollout": 1.0}


def test_a_finished_run_is_not_started_again(
    run: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notice = Notice("warning", "--num-rollout", "2: the checkpoint was saved after the last of them")
    args = Namespace(output_dir=str(run.path.parent), experiment_name=run.path.name, notices=[notice])
    monkeypatch.setattr(arguments, "parse_only", lambda *words, **more: (args, []))
    monkeypatch.setattr(arguments, "machine_problems", lambda args: [])
    monkeypatch.setattr(main, "nothing_left", lambda args: notice.text)
    monkeypatch.setattr(main, "print_header", lambda args: pytest.fail("the run was started"))
    assert slime.train(num_rollout=2) == run
    warnings = capsys.readouterr().err
    assert warnings == "warning: --num-rollout: 2: the checkpoint was saved after the last of them\n"


def test_without_pandas_the_error_names_the_extra(run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'slime\[pandas\]'"):
        _ = run.metrics


def test_another_folder_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no run\.json"):
        slime.load_run(tmp_path)


def test_a_new_run_without_records_has_no_rows(tmp_path: Path) -> None:
    write_run_info(tmp_path, {"hf_checkpoint": None}, ["train.py"])
    run = slime.load_run(tmp_path)
    assert (run.metric_rows(), list(run.sample_rows())) == ([], [])
