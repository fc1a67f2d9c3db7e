"""The files of a run in its folder for the board, the replay and the doctor."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.data.sample import Sample
from slime.observability import run_info, sample_record
from slime.observability.run_info import (
    FILE,
    RunInfo,
    hide_secrets,
    hide_secrets_of_words,
    read_run_info,
    write_run_info,
)
from slime.observability.sample_record import (
    LIGHT,
    read_rows,
    record_file,
    record_rollout,
    record_training,
    sample_of_row,
    train_files,
)
from slime.utils.errors import DataError


def sample(index: int, **more: Any) -> Sample:
    made = Sample(
        group_index=index // 2,
        index=index,
        prompt=[{"role": "user", "content": "<b>&"}],
        tokens=[1, 2, 3, 4, 5],
        response="né",
        response_length=3,
        reward=0.5,
        label={"answer": [1]},
        loss_mask=[1, 0, 1],
        rollout_log_probs=[-0.5, 0.0, -1.5],
        weight_versions=["3", "3", "4"],
        status=Sample.Status.TRUNCATED,
        metadata={"a": 1, "image": torch.ones(3)},
    )
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_recorded_sample_comes_back_as_it_was(tmp_path: Path) -> None:
    trace = {"events": [{"ts": 1.0}, {"ts": 3.5}]}
    record_rollout(tmp_path, [sample(0, trace=trace, tool_calls=2), sample(1)], rollout_id=3, limit=64, reward_key=None)
    first, second = read_rows(record_file(tmp_path, "rollout", 3))
    again = sample_of_row(first)
    assert again.metadata == {"a": 1, "image": "<Tensor>"}
    again.metadata = {}
    expected = sample(0, trace=trace, tool_calls=2, metadata={})
    assert again.to_dict() == expected.to_dict()
    assert {name: first[name] for name in LIGHT} == {
        "position": 0,
        "index": 0,
        "group_index": 0,
        "status": "truncated",
        "reward": 0.5,
        "prompt_tokens": 2,
        "response_length": 3,
        "trained_tokens": 2,
        "weight_version": "3 4",
        "seconds": 2.5,
        "snippet": "né",
    }
    assert (second["position"], second["seconds"], second["trace"]) == (1, None, None)


def test_rewards_of_any_kind_are_recorded(tmp_path: Path) -> None:
    samples = [
        sample(0, reward={"acc": 1, "x": 2}),
        sample(1, reward=None),
        sample(2, reward={"x": 1}, remove_sample=True),
    ]
    record_rollout(tmp_path, samples, rollout_id=0, limit=64, reward_key="acc", kind="eval")
    rows = read_rows(record_file(tmp_path, "eval", 0), ["reward", "trained_tokens"])
    assert rows == [
        {"reward": 1.0, "trained_tokens": 2},
        {"reward": None, "trained_tokens": 2},
        {"reward": None, "trained_tokens": 0},
    ]


def test_only_the_first_samples_are_recorded_on_both_sides(tmp_path: Path) -> None:
    record_rollout(tmp_path, [sample(i) for i in range(5)], rollout_id=1, limit=2, reward_key=None)
    columns = {
        "partition": [4, 1, 0],
        "sample_indices": [4, 1, 0],
        "rewards": [0.1, 0.2, 0.3],
        "log_probs": [torch.full((3,), float(-i)) for i in (4, 1, 0)],
        "advantages": None,
    }
    record_training(tmp_path, columns, rollout_id=1, limit=2, data_parallel_rank=1)
    (file,) = train_files(tmp_path, 1)
    rows = read_rows(file)
    assert [(row["position"], row["sample_index"], row["log_probs"][0]) for row in rows] == [(1, 1, -1.0), (0, 0, 0.0)]
    assert rows[0]["advantages"] is None
    assert rows[0]["train_reward"] == 0.2
    assert len(read_rows(record_file(tmp_path, "rollout", 1))) == 2


def test_nothing_is_recorded_when_none_is_wanted(tmp_path: Path) -> None:
    record_rollout(tmp_path, [sample(0)], rollout_id=0, limit=0, reward_key=None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").write_text("a file")
    with caplog.at_level(logging.WARNING):
        record_rollout(tmp_path, [sample(0)], rollout_id=0, limit=1, reward_key=None)
    assert "the run goes on without it" in caplog.text


def test_the_command_of_a_run_is_kept_without_its_secrets(tmp_path: Path) -> None:
    words = ["/x/train.py", "--lr", "1", "--wandb-key", "s1", "--sglang-api-key=s2", "--input-key", "text"]
    args = Namespace(hf_checkpoint="m", lr=1.0, wandb_key="s1", sglang_api_key="s2", given=frozenset(), names=["a"])
    write_run_info(tmp_path, vars(args), words)
    info = read_run_info(tmp_path)
    assert info.driver == "train.py"
    assert info.argv == ["--lr", "1", "--wandb-key", "***", "--sglang-api-key=***", "--input-key", "text"]
    assert info.settings == {
        "hf_checkpoint": "m",
        "lr": 1.0,
        "wandb_key": "***",
        "sglang_api_key": "***",
        "names": ["a"],
    }
    assert info.cwd == str(Path.cwd())
    assert info.host == socket.gethostname()
    assert info.versions["torch"] == torch.__version__
    text = (tmp_path / FILE).read_text()
    assert '"s1' not in text
    assert '"s2' not in text


def test_the_commit_is_that_of_the_checkout_of_slime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "checkout" / "slime" / "observability" / "run_info.py"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr(run_info, "__file__", str(module))

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=tmp_path / "checkout", check=True, capture_output=True)

    assert run_info._commit() is None
    git("init")
    assert run_info._commit() is None
    git("add", ".")
    git("commit", "-m", "first")
    clean = run_info._commit()
    assert clean is not None
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    module.write_text("changed")
    assert run_info._commit() == clean + "+"
    # The environment of another repository: its commit says nothing about slime.
    installed = tmp_path / "checkout" / "env" / "slime" / "observability" / "run_info.py"
    monkeypatch.setattr(run_info, "__file__", str(installed))
    assert run_info._commit() is None


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--a-secret", "s9", "--b"], ["--a-secret", "***", "--b"]),
        (["HF_TOKEN=s10", "NCCL_DEBUG=INFO"], ["HF_TOKEN=***", "NCCL_DEBUG=INFO"]),
        (["--hf-token=s9"], ["--hf-token=***"]),
        (["--router-oracle-password", "s9"], ["--router-oracle-password", "***"]),
        (["--wandb-key", "--lr", "1"], ["--wandb-key", "--lr", "1"]),
        (["--rm-url", "http://me:s9@host/x"], ["--rm-url", "http://***@host/x"]),
        (["--rm-url=http://me:s9@host/x"], ["--rm-url=http://***@host/x"]),
        (
            ["--train-env-vars", '{"HF_TOKEN": "s9", "AWS_SECRET_ACCESS_KEY": "s9", "N": 1}'],
            ["--train-env-vars", '{"HF_TOKEN": "***", "AWS_SECRET_ACCESS_KEY": "***", "N": 1}'],
        ),
        (['--train-env-vars={"WANDB_API_KEY": "s9"}'], ['--train-env-vars={"WANDB_API_KEY": "***"}']),
        (
            ["--label-key", "a", "--rollout-stop-token-ids", "3", "--sglang-bucket-inter-token", "0.1", "{x", "a@b"],
            ["--label-key", "a", "--rollout-stop-token-ids", "3", "--sglang-bucket-inter-token", "0.1", "{x", "a@b"],
        ),
    ],
)
def test_secrets_are_hidden_wherever_they_stand(words: list[str], kept: list[str]) -> None:
    assert hide_secrets_of_words(words) == kept


def test_secrets_are_hidden_in_arguments_of_any_depth() -> None:
    values = {
        "wandb_key": "s",
        "sglang_argv": ["--api-key", "s", "--tp", "2"],
        "sglang_api_key": None,
        "env": {"HF_TOKEN": "s", "AWS_SESSION_TOKEN": "s", "N": [1]},
        "urls": ("ftp://a:s@b",),
    }
    assert hide_secrets(values) == {
        "wandb_key": "***",
        "sglang_argv": ["--api-key", "***", "--tp", "2"],
        "sglang_api_key": None,
        "env": {"HF_TOKEN": "***", "AWS_SESSION_TOKEN": "***", "N": [1]},
        "urls": ["ftp://***@b"],
    }


def test_a_path_of_the_command_is_found_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    info = RunInfo("train.py", [], str(tmp_path), 0.0)
    assert info.resolved("model") == str(tmp_path / "model")
    assert info.resolved("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    assert info.resolved("/m") == "/m"
    assert info.resolved(None) is None


@pytest.mark.parametrize(
    "odd",
    [
        {"response": "\ud800 half a character"},
        {"metadata": {(1, 2): "no key of JSON", "a": "\udfff"}},
        {"metadata": {"a": {1, 2}, "b": float("nan")}},
        {"reward": float("inf")},
        {"trace": {"events": []}},
    ],
    ids=str,
)
def test_odd_samples_are_recorded(tmp_path: Path, odd: dict[str, Any]) -> None:
    record_rollout(tmp_path, [sample(0, **odd), sample(1)], rollout_id=0, limit=2, reward_key=None)
    first, second = read_rows(record_file(tmp_path, "rollout", 0))
    assert (sample_of_row(first).index, sample_of_row(second).response) == (0, "né")


def test_a_sample_that_cannot_be_recorded_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop: dict[str, Any] = {}
    loop["itself"] = loop
    columns = {"partition": [0], "sample_indices": [0], "rewards": ["one"]}
    with caplog.at_level(logging.WARNING):
        record_rollout(tmp_path, [sample(0, metadata=loop)], rollout_id=0, limit=1, reward_key=None)
        record_training(tmp_path, columns, rollout_id=0, limit=1, data_parallel_rank=0)
    assert caplog.text.count("the run goes on without it") == 2


def test_a_rollout_that_is_made_again_forgets_what_was_trained_on_it_before(tmp_path: Path) -> None:
    columns = {"partition": [0], "sample_indices": [0], "rewards": [0.5]}
    record_rollout(tmp_path, [sample(0)], rollout_id=3, limit=1, reward_key=None)
    for rank in (0, 1):
        record_training(tmp_path, columns, rollout_id=3, limit=1, data_parallel_rank=rank)
    record_training(tmp_path, columns, rollout_id=4, limit=1, data_parallel_rank=0)
    record_rollout(tmp_path, [sample(0)], rollout_id=3, limit=1, reward_key=None, kind="eval")
    assert len(train_files(tmp_path, 3)) == 2
    record_rollout(tmp_path, [sample(0)], rollout_id=3, limit=1, reward_key=None)
    assert train_files(tmp_path, 3) == []
    assert len(train_files(tmp_path, 4)) == 1


def test_a_new_rollout_does_not_list_the_files_of_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[int] = []
    monkeypatch.setattr(sample_record, "train_files", lambda run, rollout_id: listed.append(rollout_id) or [])
    for rollout_id in (0, 1, 1):
        record_rollout(tmp_path, [sample(0)], rollout_id=rollout_id, limit=1, reward_key=None)
    assert listed == [1]


@pytest.mark.parametrize("text", [None, "{", json.dumps({"driver": "x"})])
def test_a_folder_that_is_no_run_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(DataError, match=str(tmp_path)):
        read_run_info(tmp_path)
