"""The whole command line: impossible settings are reported before anything starts, by flag, value and fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.ray.arguments import parse_args
from tests.limits import unloaded_time


def flags(task: Any, *more: Any) -> list[str]:
    base = ["--hf-checkpoint", task.model, "--prompt-data", task.train, "--rollout-num-gpus", 1, "--num-rollout", 2]
    base += ["--rollout-batch-size", 8, "--n-samples-per-prompt", 4, "--actor-num-gpus-per-node", 2]
    base += ["--rollout-max-response-len", 8, "--rm-type", "math", "--fp32"]
    return [str(item) for item in (*base, *more)]


def parse(task: Any, *more: Any) -> Namespace:
    return parse_args(argv=flags(task, *more))


def problems(task: Any, capsys: pytest.CaptureFixture[str], *more: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(task, *more)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_a_minimal_command_resolves_to_one_step_per_rollout(tiny_task):
    args = parse(tiny_task)
    assert (args.global_batch_size, args.num_steps_per_rollout, args.world_size) == (32, 1, 2)
    assert Path(args.output_dir).is_absolute()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rm-type", "mth"], "--rm-type mth is unknown. Use one of"),
        (["--num-layers", "5"], "--num-layers 5"),
        (["--prompt-data", "/nowhere.jsonl"], "--prompt-data /nowhere.jsonl"),
        (["--tensor-model-parallel-size", "3"], "must be a multiple of --tensor-model-parallel-size 3"),
        (["--rollout-temperature", "0"], "--rollout-temperature 0.0 must be above 0"),
        (
            ["--global-batch-size", "12", "--num-steps-per-rollout", "2"],
            "must equal --global-batch-size 12 x --num-steps-per-rollout",
        ),
        (["--custom-rm-path", "nowhere.module.reward"], "--custom-rm-path nowhere.module.reward"),
        (["--n-samples-per-prompt", "1"], "--n-samples-per-prompt 1 makes every group-relative advantage zero"),
        (["--sglang-port", "3", "--strict-args"], "--sglang-port: dropped: it is chosen by slime"),
        (["--save-interval", "0"], "--save-interval 0 must be at least 1"),
        (["--eval-prompt-data", "only-a-path", "x", "y"], "--eval-prompt-data"),
        (["--bf16"], "--bf16, --fp16 and --fp32 exclude each other"),
        (["--eps-clip-c", "0.5"], "--eps-clip-c 0.5 must be above 1"),
    ],
)
def test_a_bad_flag_is_named_with_its_value(more, message, tiny_task, capsys):
    assert message in problems(tiny_task, capsys, *more)


def test_several_problems_come_in_one_message(tiny_task, capsys):
    text = problems(tiny_task, capsys, "--rm-type", "mth", "--rollout-temperature", "0", "--save-interval", "0")
    assert "3 problems" in text or "4 problems" in text
    assert all(flag in text for flag in ("--rm-type", "--rollout-temperature", "--save-interval"))


def test_a_malformed_line_is_named_by_file_and_number(tiny_task, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "1+1", "label": "2"}\n{"prompt": \n')
    assert f"{path}:2" in problems(tiny_task, capsys, "--prompt-data", path)


def test_an_empty_file_is_named(tiny_task, tmp_path, capsys):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert str(path) in problems(tiny_task, capsys, "--prompt-data", path)


def test_a_load_directory_that_holds_something_else_is_an_error_not_a_fresh_start(tiny_task, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("no checkpoint")
    assert f"--load {tmp_path}" in problems(tiny_task, capsys, "--load", tmp_path)


def test_a_checkpoint_of_another_model_names_field_and_both_values(tiny_task, capsys):
    config = json.loads((Path(tiny_task.model) / "config.json").read_text())
    text = problems(tiny_task, capsys, "--hidden-size", config["hidden_size"] + 1)
    assert f"--hidden-size {config['hidden_size'] + 1}" in text
    assert str(config["hidden_size"]) in text


def test_help_answers_without_loading_the_engines():
    started = unloaded_time()
    code = (
        "import sys, slime.utils.arguments as a\n"
        "try: a.parse_args(argv=['--help-all'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'sglang', 'megatron', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.strip() == "[]", result.stderr
    assert "--eps-clip" in result.stdout
    assert unloaded_time() - started < 30


def test_a_transport_whose_package_is_missing_is_refused_before_anything_starts(tiny_task, capsys, monkeypatch):
    monkeypatch.setattr("slime.ray.rules.importlib.util.find_spec", lambda name: None)
    assert "--rollout-data-transport nixl needs the package nixl" in problems(
        *(tiny_task, capsys, "--rollout-data-transport", "nixl")
    )
    monkeypatch.setattr("slime.ray.rules.importlib.util.find_spec", lambda name: name)
    assert parse(tiny_task, "--rollout-data-transport", "nixl").rollout_data_transport == "nixl"


def test_the_flags_of_the_log_prob_server_are_idle_in_a_training_run(tiny_task):
    args = parse(tiny_task, "--teacher-port", "80")
    assert "no effect: only python -m slime.backends" in next(
        n.text for n in args.notices if n.flag == "--teacher-port"
    )


def test_streams_are_not_posted_from_every_node(tiny_task):
    streams = ("--custom-generate-function-path", "slime.rollout.sglang_streaming_rollout.generate_streaming")
    notices = parse(tiny_task, "--use-distributed-post", *streams).notices
    assert "no effect on streams" in next(n.text for n in notices if n.flag == "--use-distributed-post")
    assert not any(n.flag == "--use-distributed-post" for n in parse(tiny_task, "--use-distributed-post").notices)


@pytest.mark.parametrize("flag", ["--save", "--save-hf", "--save-debug-rollout-data"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(
    tiny_task, capsys, monkeypatch, tmp_path, flag
):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    path = tmp_path / "not" / "there_{rollout_id}"
    text = problems(tiny_task, capsys, flag, path, "--save-interval", "1")
    assert f"{flag} {path}: {tmp_path} cannot be written" in text


def test_functions_of_an_evaluation_set_are_compared_with_their_calls_as_well(tiny_task, capsys, tmp_path):
    (tmp_path / "own.py").write_text("def score(no_sample): return 0.0\n")
    sets = f"eval: {{datasets: [{{name: own, path: {tiny_task.train}, custom_rm_path: '{tmp_path}/own.py:score'}}]}}\n"
    (tmp_path / "eval.yaml").write_text(sets)
    text = problems(tiny_task, capsys, "--eval-config", tmp_path / "eval.yaml", "--eval-interval", 1)
    assert "--eval-config, set own, custom_rm_path" in text
    assert "is called with (args, sample)" in text


def test_functions_that_only_a_role_names_are_loaded_and_compared(tiny_task, capsys, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def init(): pass\n")
    monkeypatch.chdir(tmp_path)
    entry = "{role: actor, overrides: {custom_megatron_init_path: 'own.py:init', custom_loss_function_path: gone.loss}}"
    (tmp_path / "roles.yaml").write_text(f"megatron: [{entry}]\n")
    text = problems(tiny_task, capsys, "--megatron-config-path", tmp_path / "roles.yaml")
    where = f"--megatron-config-path {tmp_path}/roles.yaml: actor"
    assert f"{where}: --custom-megatron-init-path {tmp_path}/own.py:init is called with (args)" in text
    assert f"{where}: --custom-loss-function-path gone.loss: module 'gone'" in text


@pytest.mark.parametrize("program", ["train.py", "train_async.py"])
def test_help_names_the_program_that_was_asked(program: str, capsys):
    with pytest.raises(SystemExit):
        parse_args(argv=["--help"], is_async=program == "train_async.py")
    assert capsys.readouterr().out.startswith(f"usage: {program} --hf-checkpoint")


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--experiment-name", "x" * 300, "has 300 bytes, and a file name may have 255"),
        ("--experiment-name", "\u4f60" * 100, "has 300 bytes, and a file name may have 255"),
        ("--experiment-name", "a\0b", "'a\\x00b': it contains a NUL character"),
        ("--experiment-name", "../up", "--experiment-name ../up: it must be one folder name, without /"),
        ("--experiment-name", "/etc/x", "it must be one folder name, without /"),
        ("--experiment-name", "..", "'..' is not the name of a folder"),
        ("--tb-experiment-name", "x" * 300, "has 300 bytes, and a file name may have 255"),
        ("--tb-experiment-name", "group/../../up", "'..' is not the name of a folder"),
        ("--tb-experiment-name", "/etc/x", "'' is not the name of a folder"),
        ("--output-dir", "y" * 300, "has 300 bytes, and a file name may have 255"),
        ("--output-dir", "/".join(["y" * 200] * 30), "bytes, and a path may have 3840"),
        ("--save", "a\0b", "it contains a NUL character"),
        ("--eval-prompt-data", "a\0b", "it contains a NUL character"),
        ("--eval-prompt-data", ("set", "y" * 300), "has 300 bytes, and a file name may have 255"),
    ],
)
def test_a_name_that_no_file_can_have_is_a_plain_error(tiny_task, capsys, flag: str, value: Any, reason: str):
    text = problems(tiny_task, capsys, flag, *([value] if isinstance(value, str) else value))
    assert text.startswith(f"error: {flag} ")
    assert reason in text


def test_usual_names_are_usable(tiny_task, tmp_path):
    for name in ("run 1", "a.b-c_d", "\u4f60\u597d", "x" * 255):
        assert parse(tiny_task, "--output-dir", tmp_path, "--experiment-name", name).experiment_name == name
    assert parse(tiny_task, "--output-dir", tmp_path, "--tb-experiment-name", "group/run").experiment_name


def test_too_few_open_files_are_a_plain_error_of_a_start_and_not_of_a_plan(tiny_task, tmp_path):
    code = "import sys; from slime.ray.arguments import parse_args; parse_args(); print('would start')"
    command = [sys.executable, "-c", code, *flags(tiny_task, "--output-dir", tmp_path)]
    limited = ["bash", "-c", 'ulimit -n 128; exec "$@"', "bash", *command]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ulimit -n is 128: a process may open that many files and sockets")
    assert "ulimit -n 65536" in done.stderr
    plan = ["bash", "-c", 'ulimit -n 128; exec "$@"', "bash", sys.executable, "-m", "slime", "plan", *command[3:]]
    assert subprocess.run(plan, capture_output=True, timeout=120, check=False).returncode == 0
