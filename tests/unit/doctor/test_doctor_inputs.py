"""Each check of the inputs of a train command, made to fail, and the command ``slime doctor`` itself."""

from __future__ import annotations

import io
import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.cli import main
from slime.config.groups import Notice
from slime.data.prompts import Dataset
from slime.doctor import Finding, Situation, command_checks, examine, exit_status, render, render_json
from slime.ray.arguments import parse_only
from tools.make_tiny_task import TinyTask


def flags(task: TinyTask, *more: str) -> list[str]:
    return [
        *("--hf-checkpoint", str(task.model), "--prompt-data", str(task.train), "--label-key", "label"),
        *("--rm-type", "math", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
        *("--apply-chat-template", "--rollout-max-response-len", "16"),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", *more),
    ]


def situation(task: TinyTask, **changes: Any) -> Situation:
    args, problems = parse_only(flags(task), loads_hooks=False)
    assert args is not None
    for name, value in changes.items():
        setattr(args, name, value)
    return Situation(args, tuple(problems))


@pytest.fixture
def model(tiny_task: TinyTask, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may break."""
    return Path(shutil.copytree(tiny_task.model, tmp_path / "model"))


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_every_problem_of_the_command_line_is_a_line() -> None:
    findings = list(command_checks.arguments(Situation(None, ("--lr -1 is wrong.", "--x 2 is wrong."))))
    assert [(finding.status, finding.value) for finding in findings] == [
        ("fail", "--lr -1 is wrong."),
        ("fail", "--x 2 is wrong."),
    ]


def test_a_clean_command_line_is_fine(tiny_task: TinyTask) -> None:
    assert only(command_checks.arguments(situation(tiny_task))).status == "ok"


def test_what_was_guessed_is_to_be_looked_at() -> None:
    args = Namespace(notices=[Notice("warning", "--rm-type", "guessed"), Notice("info", "--lr", "default")])
    assert only(command_checks.notices(Situation(args))).value == "--rm-type: guessed"


def test_a_function_with_the_wrong_signature_fails(tiny_task: TinyTask, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward_func():\n    return 1\n")
    path = f"{tmp_path / 'reward.py'}:reward_func"
    finding = only(command_checks.hooks(situation(tiny_task, custom_rm_path=path)))
    assert finding.status == "fail"
    assert "signature" in finding.value


def test_functions_that_fit_are_listed(tiny_task: TinyTask, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("async def reward_func(args, sample, **kwargs):\n    return 1\n")
    args, _ = parse_only(flags(tiny_task, "--custom-rm-path", f"{tmp_path / 'reward.py'}"), loads_hooks=False)
    assert "--custom-rm-path" in only(command_checks.hooks(Situation(args))).value


def test_a_complete_checkpoint_is_fine(tiny_task: TinyTask) -> None:
    assert only(command_checks.weights(situation(tiny_task))).status == "ok"


def test_a_missing_shard_is_named(tiny_task: TinyTask, model: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    finding = only(command_checks.weights(situation(tiny_task, hf_checkpoint=str(model))))
    assert finding.status == "fail"
    assert "1 of 2 files are missing: model-00002-of-00002.safetensors" in finding.value


@pytest.mark.parametrize("damage", ["cut", "header", "length"])
def test_a_truncated_or_damaged_shard_is_named(damage: str, tiny_task: TinyTask, model: Path) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    match damage:
        case "cut":
            file.write_bytes(content[:-100])
        case "header":
            file.write_bytes(content[:8] + b"?" + content[9:])
        case _:
            file.write_bytes(b"\xff" * 8 + content[8:])
    finding = only(command_checks.weights(situation(tiny_task, hf_checkpoint=str(model))))
    assert finding.status == "fail"
    assert "truncated or damaged: model.safetensors" in finding.value


def test_a_checkpoint_without_weights_fails(tiny_task: TinyTask, model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "no .safetensors" in only(command_checks.weights(situation(tiny_task, hf_checkpoint=str(model)))).value


def test_an_index_that_is_no_index_fails(tiny_task: TinyTask, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("[]")
    assert only(command_checks.weights(situation(tiny_task, hf_checkpoint=str(model)))).status == "fail"


def test_the_start_of_training_is_named(tiny_task: TinyTask) -> None:
    assert str(tiny_task.model) in only(command_checks.resume(situation(tiny_task))).value


def test_a_checkpoint_to_resume_from_that_is_not_there_fails(tiny_task: TinyTask, tmp_path: Path) -> None:
    finding = only(command_checks.resume(situation(tiny_task, load=str(tmp_path / "none"))))
    assert finding.status == "fail"
    assert "--load" in finding.value


def test_a_missing_tokenizer_fails(tiny_task: TinyTask, model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert only(command_checks.tokenizer(situation(tiny_task, hf_checkpoint=str(model)))).status == "fail"


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_fails(tiny_task: TinyTask) -> None:
    finding = only(command_checks.tokenizer(situation(tiny_task, vocab_size=7)))
    assert finding.status == "fail"
    assert "another checkpoint" in finding.fix


def test_a_tokenizer_that_loses_characters_is_pointed_out(tiny_task: TinyTask) -> None:
    assert only(command_checks.tokenizer(situation(tiny_task))).status == "warn"  # it knows ASCII only


def test_a_checkpoint_without_a_template_fails_where_prompts_need_one(tiny_task: TinyTask, model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    broken = {"hf_checkpoint": str(model)}
    assert only(command_checks.chat_template(situation(tiny_task, **broken))).status == "fail"
    assert list(command_checks.chat_template(situation(tiny_task, **broken, apply_chat_template=False))) == []


def test_a_template_that_renders_is_fine(tiny_task: TinyTask) -> None:
    assert only(command_checks.chat_template(situation(tiny_task))).status == "ok"


@pytest.mark.parametrize(
    ("row", "fix"),
    [({"question": "a", "label": "b"}, "--input-key"), ({"prompt": "a", "answer": "b"}, "--label-key")],
)
def test_a_first_row_without_the_named_keys_fails(
    row: dict[str, str], fix: str, tiny_task: TinyTask, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    finding = only(command_checks.first_row(situation(tiny_task, prompt_data=str(file))))
    assert finding.status == "fail"
    assert fix in finding.fix


def test_a_first_row_may_have_what_the_data_source_reads_instead(tiny_task: TinyTask, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "label": "b"}) + "\n")
    args, _ = parse_only(flags(tiny_task, "--input-key", "input", "--prompt-data", str(file)), loads_hooks=False)
    assert only(command_checks.first_row(Situation(args))).status == "ok"
    assert Dataset(str(file), None, None, None, prompt_key="input")[0].prompt == "a"


@pytest.mark.parametrize("content", ["", "not json\n"])
def test_a_file_without_rows_fails(content: str, tiny_task: TinyTask, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    assert only(command_checks.first_row(situation(tiny_task, prompt_data=str(file)))).status == "fail"


def test_a_check_that_breaks_does_not_hide_the_others(tiny_task: TinyTask) -> None:
    def broken(situation: Situation) -> Iterator[Finding]:
        raise OSError("surprise")

    findings = examine(Situation(None, ("--lr -1 is wrong.",)), (broken, command_checks.arguments))
    assert [finding.value for finding in findings] == [
        "the check itself failed: OSError: surprise",
        "--lr -1 is wrong.",
    ]


def test_the_status_says_whether_something_failed() -> None:
    good, bad = Finding("warn", "a", "b", "c"), Finding("fail", "a", "b", "c")
    assert exit_status([good]) == 0
    assert exit_status([good, bad]) == 1


def test_a_finding_is_printed_with_its_fix() -> None:
    stream = io.StringIO()
    render([Finding("fail", "disk", "[full]", "free space")], stream)
    assert "FAIL  disk  [full]" in stream.getvalue()
    assert "fix: free space" in stream.getvalue()


def test_the_json_has_one_record_per_finding() -> None:
    stream = io.StringIO()
    render_json([Finding("fail", "disk", "full", "free space")], stream)
    assert json.loads(stream.getvalue())["findings"] == [
        {"status": "fail", "what": "disk", "value": "full", "fix": "free space"}
    ]


def test_the_doctor_examines_a_train_command(tiny_task: TinyTask, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json", "--", "python", "train.py", *flags(tiny_task)])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {finding["what"] for finding in findings} >= {"Python", "arguments", "weights", "chat template", "disk"}


def test_the_doctor_without_a_command_looks_at_the_machine_only(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert "weights" not in {finding["what"] for finding in findings}


def test_a_command_with_a_problem_fails(tiny_task: TinyTask, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags(tiny_task, "--rollout-temperature", "0")]) == 1
    assert "--rollout-temperature" in capsys.readouterr().out
