"""``slime plan`` and ``--help`` as commands: their input, output and imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from slime import cli
from slime.backends.sglang_utils.server_args import _CPU_DEFAULTS
from slime.cli import TrainCommand, UsageError, main, read_command
from slime.config.plan.engine import CPU_TOKENS
from slime.data.dump_file import save_debug_rollout_data
from slime.data.sample import Sample
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
    with pytest.raises(SystemExit) as end:
        main(["plan", f"--device-memory-gb={value}", "--lr", "1"])
    assert end.value.code == 2
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


def test_a_plan_on_a_machine_without_gpus_is_about_its_memory(
    tiny_task: TinyTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    main(["plan", *flags(tiny_task)])
    text = capsys.readouterr().out
    assert "for this machine, which has no GPU" in text
    assert "Host memory, this machine" in text
    assert "full, gloo" in text
    for word in ("80 GiB (", "CUDA", "NCCL", "nccl", "NVLink", "0-0", "1-1", "node  devices"):
        assert word not in text
    main(["plan", "--json", *flags(tiny_task)])
    plan = json.loads(capsys.readouterr().out)
    assert (plan["is_cpu"], plan["device_bytes"], plan["placement"]["num_nodes"]) == (True, 0, 1)
    assert plan["host_bytes"] == psutil.virtual_memory().total
    assert plan["engine"]["tokens"] == 65536


@pytest.mark.parametrize(
    "elsewhere",
    [("--device-memory-gb", "80"), ("--actor-num-nodes", "2"), ("--num-layers", "4", "--hidden-size", "128")],
)
def test_a_plan_for_other_machines_is_about_their_gpus(
    elsewhere: tuple[str, ...], tiny_task: TinyTask, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "--json", *flags(tiny_task, *elsewhere)])
    plan = json.loads(capsys.readouterr().out)
    assert (plan["is_cpu"], plan["device_bytes"]) == (False, 80 * 2**30)


def test_reasons_against_a_start_come_first(tiny_task: TinyTask, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *flags(tiny_task, "--rollout-temperature", "0")])
    text = capsys.readouterr().out
    assert text.index("\nProblems") < text.index("--rollout-temperature 0") < text.index("\nBatch")


def test_a_missing_model_is_one_problem_with_the_command_that_downloads_it(
    tiny_task: TinyTask, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--hf-checkpoint", "Qwen/Qwen3-0.6B", "--ref-load", "Qwen/Qwen3-0.6B", "--use-kl-loss")
    main(["plan", "--json", *flags(tiny_task, *more, "--kl-loss-type", "k2")])
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.endswith(": hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B")


def test_a_learning_rate_that_was_not_given_is_a_decision(
    tiny_task: TinyTask, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = {"level": "info", "flag": "--lr"}
    for more, is_there in (((), True), (("--lr", "1e-4"), False)):
        main(["plan", "--json", *flags(tiny_task, *more)])
        notices = json.loads(capsys.readouterr().out)["notices"]
        assert any(decision.items() <= notice.items() for notice in notices) == is_there


def test_the_cache_of_an_engine_on_a_cpu_is_that_of_the_engines() -> None:
    assert str(CPU_TOKENS) == _CPU_DEFAULTS["--max-total-tokens"]


def test_the_plan_of_a_dump_has_the_share_of_its_unique_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = str(tmp_path / "{rollout_id}.pt")
    samples = [Sample(index=i, tokens=[1, 2, 3, 9 + i], response_length=1, reward=0.0) for i in range(2)]
    save_debug_rollout_data(dump, samples, rollout_id=0, evaluation=False)
    assert cli._unique_in_dump(dump) == 5 / 8
    # tokens that the engine sent to other experts are not shared, and images share nothing
    for sample in samples:
        sample.rollout_routed_experts = torch.full((3, 1, 1), sample.index)
    save_debug_rollout_data(dump, samples, rollout_id=0, evaluation=False)
    assert cli._unique_in_dump(dump) == 1.0
    samples[0].multimodal_train_inputs = {"pixel_values": torch.zeros(1)}
    save_debug_rollout_data(dump, samples, rollout_id=0, evaluation=False)
    assert cli._unique_in_dump(dump) is None
    assert cli._unique_in_dump(str(tmp_path / "none_{rollout_id}.pt")) is None
    assert cli._unique_in_dump(None) is None
