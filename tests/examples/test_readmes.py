"""Every offline command in a README of the examples is tried, up to the driver's start.

An offline run is executed with the driver replaced: its flags are resolved and checked, functions included, and the
files that the real driver would leave are put there. With the real driver runs retool, as it is, in
``tests/e2e/test_examples_real.py``, the functions of other examples in ``tests/e2e/test_examples_together.py`` and
``test_loop_vision.py``. The launch scripts are tried in ``test_launchers.py``.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from slime.cli import main as main_of_slime
from slime.ray.arguments import parse_only
from tests.doc_commands import bash_blocks, commands, make_model
from tests.e2e.running import ROOT

EXAMPLES = ROOT / "examples"
DIRECTORIES = sorted(path.name for path in EXAMPLES.iterdir() if (path / "README.md").is_file())
HELPERS = ("tiny", "demo")


def blocks(name: str) -> list[str]:
    return bash_blocks(EXAMPLES / name / "README.md")


OFFLINE = [
    (name, line)
    for name in DIRECTORIES
    for block in blocks(name)
    if not block.startswith("# needs a GPU")
    for line in commands(block)
]


def test_every_directory_is_whole_and_in_the_index():
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(DIRECTORIES)
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in folders:
        assert f"]({name})" in index, f"examples/README.md does not list {name}"
        assert name in HELPERS or (EXAMPLES / name / "run_tiny.py").is_file()
        assert name in HELPERS or any(line.startswith(f"python examples/{name}/") for _, line in OFFLINE)
        assert name in HELPERS or any((EXAMPLES / name).glob("run-*.sh"))


@pytest.mark.parametrize("name", DIRECTORIES)
def test_the_files_of_a_readme_exist(name):
    table = re.findall(r"^\| `([\w./]+\.(?:py|yaml))` \|", (EXAMPLES / name / "README.md").read_text(), re.MULTILINE)
    assert [file for file in table if not (EXAMPLES / name / file).is_file()] == []


class Driver:
    """Replaces ``run_train``: checks the flags and leaves the files of a run."""

    def __init__(self) -> None:
        self.runs: list[list[str]] = []

    def __call__(self, name, flags, script="train.py"):
        words = [str(flag) for flag in flags]
        args, problems = parse_only(words, is_async=script == "train_async.py")
        assert problems == []
        self.runs.append(words)
        if args.save_hf:
            for rollout in range(args.num_rollout):
                shutil.copytree(args.hf_checkpoint, str(args.save_hf).format(rollout_id=rollout))
        if args.debug_train_only and args.save:
            Path(args.save).mkdir(parents=True)
            (Path(args.save) / "latest_checkpointed_iteration.txt").write_text("0")


@pytest.fixture
def run_offline(monkeypatch, tmp_path):
    from contextlib import contextmanager

    from examples.tiny import recipe

    driver = Driver()

    def run(line: str) -> Driver:
        words = shlex.split(line)
        module = importlib.import_module(words[1].removesuffix(".py").replace("/", "."))
        argv = [str(tmp_path / word) if word.startswith("outputs/") else word for word in words[1:]]
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", argv)

        @contextmanager
        def serve(model, output):
            yield "http://127.0.0.1:1"

        replaced = {
            "run_train": driver,
            "serve": serve,
            "read_metrics": lambda output, name: [],
            "series": lambda records, name: [0.0, 1.0],
        }
        for name, value in replaced.items():
            monkeypatch.setattr(recipe, name, value)
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        module.main()
        return driver

    return run


@pytest.mark.parametrize(
    "line", [line for _, line in OFFLINE if line.split()[1].endswith("/run_tiny.py")], ids=lambda line: line[16:]
)
def test_an_offline_run_makes_its_data_and_starts_drivers_that_would_run(line, run_offline, capsys):
    driver = run_offline(line)
    assert len(driver.runs) == 2, "a warm start, and the run that the example is about"
    assert capsys.readouterr().out, "it says what came of it"
    warm, _ = driver.runs
    rows = Path(warm[warm.index("--prompt-data") + 1]).read_text().splitlines()
    assert len(rows) >= 1600


@pytest.mark.parametrize("line", [line for _, line in OFFLINE if "-m slime.testing" in line])
def test_plugin_checks_of_a_readme_pass(line, monkeypatch):
    from slime.testing.__main__ import main

    monkeypatch.chdir(ROOT)
    assert main(shlex.split(line)[3:]) == 0


@pytest.mark.parametrize("line", [line for _, line in OFFLINE if line.startswith("slime plan")])
def test_plans_of_a_readme_can_be_made(line, monkeypatch, readers_place, capsys):
    monkeypatch.chdir(readers_place)
    assert main_of_slime(shlex.split(line)[1:]) == 0, capsys.readouterr().out


def test_no_offline_command_is_left_out():
    known = ("/run_tiny.py ", "-m slime.testing ", "slime plan ", "examples/demo/run_demo.py ")
    assert [line for _, line in OFFLINE if not any(part in line for part in known)] == []


@pytest.fixture(scope="module")
def readers_place(tmp_path_factory):
    """A directory with the files that a reader would have: a model, data, settings."""
    place = tmp_path_factory.mktemp("reader")
    (place / "examples").symlink_to(EXAMPLES)
    make_model(place / "Qwen3-4B")
    row = json.dumps({"prompt": [{"role": "user", "content": "q"}], "label": "1"}) + "\n"
    made = place / "outputs" / "eval_multi_task"  # by the offline run
    made.mkdir(parents=True)
    for data in ("train.jsonl", made / "short.jsonl"):
        (place / data).write_text(row * 64)
    shutil.copy(made / "short.jsonl", made / "overlap.jsonl")
    return place
