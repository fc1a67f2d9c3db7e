"""Tests of the task: ``python -m pytest``. They start no engine and take some seconds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from slime.data import Sample
from slime.testing import check_plugin

HERE = Path(__file__).parent


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"my_task_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    module("data").main(folder)
    return folder


def rows(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_no_question_is_in_both_sets(data: Path) -> None:
    names = ("train.jsonl", "eval.jsonl")
    train, held_out = ({json.dumps(row["prompt"]) for row in rows(data / name)} for name in names)
    assert len(train) > len(held_out) > 0
    assert not train & held_out


@pytest.mark.parametrize(
    ("response", "turns", "status", "reward"),
    [
        ("9", 1, "completed", 1.0),
        ("4\nuser\nno\nassistant\n9", 2, "completed", 0.5),
        ("4", 1, "completed", 0.0),
        ("", 1, "completed", 0.0),
        ("9", 1, "truncated", 0.0),
    ],
)
def test_the_reward_of_an_answer(response: str, turns: int, status: str, reward: float) -> None:
    sample = Sample(response=response, label="9", status=Sample.Status(status), metadata={"turns": turns})
    assert module("reward").reward_func(None, sample) == reward


@pytest.mark.parametrize(
    ("flag", "file"), [("--custom-rm-path", "reward.py"), ("--custom-generate-function-path", "generate.py")]
)
def test_a_function_keeps_the_contract_of_its_flag(flag: str, file: str, data: Path) -> None:
    with_data = ("--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "train.jsonl"))
    assert check_plugin(flag, str(HERE / file), *with_data, "--apply-chat-template", "--label-key", "label") == []
