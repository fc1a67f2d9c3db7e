"""``slime --help``, ``train.py --help`` and commands that do not exist."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

from slime.cli import COMMANDS, main, quiet_if_unread
from slime.config.parse import MOST_USED, build_parser
from slime.ray.arguments import GROUPS, parse_only

ROOT = Path(__file__).resolve().parents[3]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        status = main(words)
    except SystemExit as end:  # argparse
        status = end.code
    assert status == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_help_has_a_usage_line_and_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *words)
    assert "\nUsage: slime <command>" in text
    assert all(f"\n  {command.name} " in text for command in COMMANDS)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("columns", ["60", "130"])
@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"]])
def test_the_help_has_the_width_of_the_terminal(
    words: list[str], columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    widest = max(map(len, printed(capsys, *words).splitlines()))
    assert int(columns) // 2 < widest <= int(columns)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_command_describes_itself(command, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *command.name.split(), "--help")
    program = command.name.replace("train-async", "train_async.py").replace(
        "train", "train.py", command.name == "train"
    )
    assert out.lower().startswith(("usage: slime " + program, "usage: " + program))


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "slime", "--help"],
        ["-u", "-m", "slime", "--help"],
        ["-m", "slime", "plan", "--hf-checkpoint", "absent", "--json"],
        ["train.py", "--help"],
        ["train_async.py", "--plan"],
    ],
    ids=" ".join,
)
def test_a_command_whose_output_is_not_read_ends_quietly(words: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_output_that_cannot_encode_a_character_shows_its_code() -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    program = "from slime.cli import quiet_if_unread\nwith quiet_if_unread(): print('train \u00b7 run')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "train \\xb7 run\n", "")


def test_an_error_of_another_pipe_is_not_hidden() -> None:
    with pytest.raises(BrokenPipeError, match="of a tool"), quiet_if_unread():
        raise BrokenPipeError("of a tool")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_command_exists(command) -> None:
    module, _, function = command.run.partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["plann"], "did you mean plan?"),
        (["train.py"], "did you mean train?"),
        (["doctor", "leger", "outputs/x"], "did you mean doctor ledger?"),
        (["xyzzy"], "slime --help lists all."),
    ],
)
def test_an_unknown_command_gets_a_hint(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("separator", [[], ["--"], ["--json", "--"]])
def test_a_train_command_behind_a_separator_is_not_a_misspelt_command(
    separator: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "doctor"):
        main([command, *separator, "python", "train.py", "--num-rollout", "1"])
        assert "is not a command of slime" not in capsys.readouterr().err


def test_the_short_help_of_training_shows_the_most_used_flags(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser(GROUPS)
    shown = [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]
    spellings = {action.dest: action.option_strings[0] for action in shown}
    listed = [name for names in MOST_USED.values() for name in names.split()]
    assert 35 <= len(listed) == len(set(listed)) <= 45
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    short = capsys.readouterr().out
    assert all(f"\n  {spellings[name]}" in short for name in listed)
    assert all(f"\n{title}:\n" in short for title in MOST_USED)
    assert "--heartbeat-timeout" not in short
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    everything = capsys.readouterr().out
    assert all(spelling in everything for spelling in spellings.values())


def test_the_help_of_training_has_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["train-async", "--help"])
    assert 60 < max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slime", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Usage: slime" in done.stdout


def test_both_drivers_and_the_command_are_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = settings["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = set(find_namespace_packages(str(ROOT), include=included))
    runs = {command.run.partition(":")[0] for command in COMMANDS}
    for module in (*runs, settings["project"]["scripts"]["slime"].partition(":")[0]):
        assert module in packages or module.rpartition(".")[0] in packages
    data = settings["tool"]["setuptools"]["package-data"]
    assert "slime.new.task" in packages
    assert {"*.sh", "*.md"} <= set(data["slime.new.task"])
    import train
    import train_async

    drivers = {command.name: command.run for command in COMMANDS if command.name.startswith("train")}
    for name, driver in (("train", train), ("train-async", train_async)):
        module, _, function = drivers[name].partition(":")
        assert getattr(import_module(module), function) is driver.main


def test_the_record_of_a_run_has_the_words_that_were_parsed() -> None:
    args, _ = parse_only(["--num-rollout", "3"], is_async=True)
    assert args is not None
    assert args.command_line == ["train_async.py", "--num-rollout", "3"]
