"""A run writes to no path that it also uses for something else, and replaces no file of the user."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.backends.training.hf_export import write_marker
from tests.unit.config.tiny_command import TinyCommand

_SAVE = "--save-interval 1 --save"
_DISK = "--update-weight-transport disk --update-weight-disk-dir"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{_SAVE} X --save-hf X", "--save-hf X and --save X are the same directory: it is replaced by Hugging"),
        (f"{_SAVE} X --save-hf X/../new", "--save-hf X and --save X are the same directory"),
        (f"{_SAVE} X/run --save-hf X", "--save-hf X contains --save X/run: it is replaced by Hugging Face checkpoint"),
        ("--save-hf X --output-dir X/out", "--save-hf X contains --output-dir X/out"),
        ("--save-hf X --output-dir X", "--save-hf X and --output-dir X are the same directory"),
        ("--save-hf D", "--save-hf D contains --hf-checkpoint D/model"),
        ("--save-hf D", "--save-hf D contains --prompt-data D/prompts.jsonl"),
        ("--save-hf D/model", "--save-hf D/model and --hf-checkpoint D/model are the same directory"),
        (
            "--hf-checkpoint D/model --save-hf D/{rollout_id} --ref-load D/3",
            "--save-hf D/{rollout_id} and --ref-load D/3 are the same directory",
        ),
        (f"{_SAVE} D/model", "--save D/model and --hf-checkpoint D/model are the same directory"),
        (f"{_SAVE} X --ref-load X", "--save X and --ref-load X are the same directory: this run's checkpoints"),
        (
            "--save-debug-rollout-data D/prompts.jsonl",
            "--save-debug-rollout-data D/prompts.jsonl and --prompt-data D/prompts.jsonl are the same fil",
        ),
        (
            "--save-debug-train-data D/prompts.jsonl",
            "--save-debug-train-data D/prompts.jsonl and --prompt-data D/prompts.jsonl are the same file",
        ),
        (
            "--prompt-data D/prompts.jsonl@[0:3] --save-debug-train-data D/prompts.jsonl",
            "--save-debug-train-data D/prompts.jsonl and --prompt-data D/prompts.jsonl@[0:3] are the same file",
        ),
        (
            "--eval-prompt-data a D/prompts.jsonl --save-debug-rollout-data D/prompts.jsonl",
            "--save-debug-rollout-data D/prompts.jsonl and --eval-prompt-data D/prompts.jsonl are the same file",
        ),
        (
            "--save-debug-rollout-data X/{rollout_id}.pt --save-debug-train-data X/{rollout_id}.pt",
            "are the same file: it is replaced by samples of each rollout",
        ),
        (f"{_DISK} X {_SAVE} X", "--update-weight-disk-dir X and --save X are the same directory"),
        (f"{_DISK} X {_SAVE} X/run", "--update-weight-disk-dir X contains --save X/run"),
        (f"{_DISK} D", "--update-weight-disk-dir D holds 'model' and was not made by slime"),
        (f"{_DISK} X --save-hf X/{{rollout_id}}", "--update-weight-disk-dir X contains --save-hf X/{rollout_id}"),
        ("--save-hf L", "--save-hf L contains --hf-checkpoint D/model"),
        (f"{_SAVE} L/run --save-hf D/run", "--save-hf D/run and --save L/run are the same directory"),
    ],
)
def test_overlapping_paths_are_refused_before_the_start(flags: str, message: str, command: TinyCommand) -> None:
    link = command.directory.parent / f"{command.directory.name}-link"
    link.symlink_to(command.directory)
    _, problems = command.run(*_named(flags, command, link).split())
    assert _named(message, command, link) in problems


@pytest.mark.parametrize(
    "flags",
    [
        f"{_SAVE} X --load X",
        f"{_SAVE} X --save-hf X/hf",
        f"{_SAVE} X --save-hf X/hf_{{rollout_id}} --output-dir X",
        f"{_SAVE} X --output-dir X --dump-details X --tensorboard-dir X --wandb-dir X",
        f"{_DISK} X/weights {_SAVE} X --update-weight-local-checkpoint-dir X/local",
        "--save-hf D/model/export",
        "--save-debug-rollout-data X/{rollout_id}.pt --save-debug-train-data X/{rollout_id}_{rank}.pt",
        "--load-debug-rollout-data R/0.pt --save-debug-train-data X/{rollout_id}.pt",
    ],
)
def test_paths_that_do_not_harm_each_other_are_accepted(flags: str, command: TinyCommand) -> None:
    dump = command.directory / "replayed" / "0.pt"
    dump.parent.mkdir()
    torch.save({}, dump)
    problems = command.run(*_named(flags, command, Path("/")).replace("R/", f"{dump.parent}/").split())[1]
    for sign in ("are the same", "contains", "it would be replaced", "holds"):
        assert sign not in problems


def _named(text: str, command: TinyCommand, link: Path) -> str:
    """D has model and prompts. L is a link to it. X and Y do not exist."""
    places = {"D": command.directory, "L": link, "X": command.directory / "new", "Y": command.directory / "other"}
    words = []
    for word in text.split(" "):
        letter, slash, rest = word.rstrip(":").partition("/")
        known = letter in places
        words.append(f"{places[letter]}{slash}{rest}{':' * word.endswith(':')}" if known else word)
    return " ".join(words)


@pytest.mark.parametrize("name", ["{rollout_id}.pt", "0.pt", "eval_3.pt"])
def test_a_dump_replaces_no_file_that_is_none(name: str, command: TinyCommand) -> None:
    template = command.directory / "dumps" / "{rollout_id}.pt"
    existing = command.write(f"dumps/{name.format(rollout_id=7)}", "my notes")
    flags = ("--save-debug-rollout-data", template)
    assert f"{existing} is there and is no dump of a run" in command.run(*flags)[1]
    torch.save({"samples": []}, existing)
    assert "is no dump" not in command.run(*flags)[1]


def test_an_export_goes_only_where_an_export_was(command: TinyCommand) -> None:
    flags = ("--save-hf", command.directory / "export", "--save-interval", "1")
    precious = Path(command.write("export/notes", "precious"))
    message = f"--save-hf {precious.parent} holds notes and no slime_export.json: these are other files"
    assert message in command.run(*flags)[1]
    precious.unlink()
    assert "--save-hf" not in command.run(*flags)[1]
    (precious.parent / "model.safetensors").touch()
    write_marker(precious.parent, {})
    assert "--save-hf" not in command.run(*flags)[1]
    precious.touch()
    assert f"--save-hf {precious.parent} holds notes, which no export wrote" in command.run(*flags)[1]


def test_only_exports_that_this_run_would_write_are_looked_at(command: TinyCommand) -> None:
    flags = ("--save-hf", command.directory / "hf_{rollout_id}", "--save-interval", "2")
    command.write("hf_0/notes", "of rollout 0, after which nothing is written")
    command.write("hf_2/notes", "the run ends before")
    assert "--save-hf" not in command.run(*flags)[1]
    command.write("hf_1/notes", "precious")
    assert f"--save-hf {command.directory}/hf_1 holds notes" in command.run(*flags)[1]
    assert "--save-hf" not in command.run(*flags, "--start-rollout-id", 2)[1]
