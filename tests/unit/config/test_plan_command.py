"""``slime plan`` and ``--help`` as commands: their input, output and imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime.cli import TrainCommand, UsageError, main, read_command
from tools.make_tiny_task import TinyTask

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "ray", "megatron", "sglang", "transformers", "numpy")


def flags(task: TinyTask, *more: str) -> list[str]:
    return [
        *("--hf-checkpoint", str(task.model), "--prompt-data", str(task.train), "--label-key", "label"),
        *("--rm-type", "math", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", "16", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", *more),
    ]


@pytest.mark.parametrize(
    ("words", "is_async"),
    [
        (["--lr", "1"], False),
        (["--", "--lr", "1"], False),
        (["train.py", "--lr", "1"], False),
        (["--", "python", "train.py", "--lr", "1"], False),
        (["OMP_NUM_THREADS=1", "python3", "-u", "/repo/train_async.py", "--lr", "1"], True),
        (["ray", "job", "submit", "--address=x", "--", "python3", "train.py", "--lr", "1"], False),
        (["slime", "train", "--lr", "1"], False),
        (["uv", "run", ".venv/bin/slime", "train-async", "--lr", "1"], True),
        (["train-async", "--lr", "1"], True),
    ],
)
def test_a_train_command_is_found_in_the_way_it_is_written(words: list[str], is_async: bool) -> None:
    assert read_command(words) == TrainCommand(["--lr", "1"], is_async)


def test_words_that_are_no_train_command_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'convert\.py' is neither a flag nor a command"):
        read_command(["convert.py", "--lr", "1"])


def test_a_command_that_would_start_has_status_0(tiny_task: TinyTask, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "train.py", *flags(tiny_task)]) == 0
    assert "4 prompts x 2 samples = 8 = global batch 8 x 1 step" in capsys.readouterr().out


def test_a_command_that_would_not_start_is_planned_all_the_same(
    tiny_task: TinyTask, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *flags(tiny_task, "--rollout-temperature", "0")]) == 2
    out = capsys.readouterr().out
    assert "--rollout-temperature" in out
    assert "Trainer memory" in out


def test_a_line_that_cannot_be_read_has_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rollout-batch-size", "many"]) == 2
    assert "--rollout-batch-size" in capsys.readouterr().err


def test_json_stands_alone_on_standard_output(tiny_task: TinyTask, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--json", "--", "python", "train.py", *flags(tiny_task, "--num-epoch", "2")])
    values = json.loads(capsys.readouterr().out)
    assert values["batch"]["num_rollouts"] == 3
    assert values["is_startable"]


def test_the_memory_of_the_device_can_be_said(tiny_task: TinyTask, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--json", "--device-memory-gb", "24", "--host-memory-gb=64", *flags(tiny_task)])
    plan = json.loads(capsys.readouterr().out)
    assert (plan["device_bytes"], plan["host_bytes"]) == (24 * 2**30, 64 * 2**30)


@pytest.mark.parametrize("value", ["lots", "0", "-1", "nan", "inf"])
def test_a_device_memory_that_is_none_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"--device-memory-gb={value}", "--lr", "1"]) == 2
    assert "--device-memory-gb" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["polan"], ["plan", "convert.py"]])
def test_an_unknown_command_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "error:" in capsys.readouterr().err


def run_and_list_heavy_modules(arguments: list[str]) -> tuple[str, list[str]]:
    """Run a script of the repository as from a shell. Returns (output, the heavy packages that it imported)."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = {arguments!r}\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    status = end.code\n"
        f"print('HEAVY', status, *[name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    marker, status, *heavy = last.split()
    assert (marker, status) in {("HEAVY", "0"), ("HEAVY", "None")}, done.stderr
    return "\n".join(lines), heavy


@pytest.mark.parametrize("driver", ["train.py", "train_async.py"])
def test_help_imports_no_engine_and_shows_groups_and_defaults(driver: str) -> None:
    output, heavy = run_and_list_heavy_modules([driver, "--help-all"])
    assert heavy == []
    assert "Cluster:" in output
    assert "Nodes of the trainer. Default: 1." in output
    assert max(map(len, output.splitlines())) <= 100


def test_a_plan_imports_no_engine(tiny_task: TinyTask) -> None:
    output, heavy = run_and_list_heavy_modules(["train.py", *flags(tiny_task), "--plan"])
    assert heavy == []
    assert "would start" in output


def test_the_asynchronous_driver_is_planned_as_such(tiny_task: TinyTask) -> None:
    output, _ = run_and_list_heavy_modules(["train_async.py", "--plan", *flags(tiny_task)])
    assert "train_async.py" in output
