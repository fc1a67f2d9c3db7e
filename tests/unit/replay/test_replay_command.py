"""The command line of a run of many processes, adapted for the replay, and the comparisons of the replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.data.sample import Sample
from slime.observability.run_info import RunInfo
from slime.replay import _compare, replay_args
from tests.unit.config.tiny_command import make_command


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
        "--num-distributed-optimizer-instances 2",
        "--sglang-config engines.yaml --rollout-num-gpus 4",
        "--prefill-num-servers=1 --rollout-num-gpus 2",
        "--rollout-num-gpus-per-engine 2 --rollout-num-gpus 2 --sglang-pp-size 2",
        "--rollout-num-gpus-per-engine 2 --rollout-num-gpus 2 --sglang-dp-size 2 --sglang-enable-dp-attention",
        "--rollout-external-engine-addrs gone:1 gone:2",
        "--max-weight-staleness 1 --strict-args",
    ],
)
def test_a_run_of_many_processes_is_replayed_in_one(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = make_command(tmp_path)
    (tmp_path / "engines.yaml").write_text(
        "sglang:\n  - {name: main, server_groups: [{worker_type: regular, num_gpus: 4}]}\n"
    )
    info = RunInfo("train.py", [*command.flags, *flags.split()], str(tmp_path), 0.0, command.model)
    args, weights = replay_args(info, None)
    assert (args.world_size, args.rollout_num_gpus, args.rollout_external, weights) == (1, 1, False, command.model)
    assert args.rollout_batch_size == 8


def row(*tokens: int, reward: float = 1.0) -> Sample:
    return Sample(tokens=list(tokens), response_length=1, reward=reward, status=Sample.Status.COMPLETED)


def test_what_is_made_again_is_compared_with_the_record() -> None:
    assert _compare(row(1, 2), [row(1, 2)])
    assert not _compare(row(1, 2), [row(1, 3)])
    assert not _compare(row(1, 2), [row(1, 2, reward=0.0)])


def test_of_several_samples_of_one_execution_one_must_be_the_record() -> None:
    assert _compare(row(1, 2), [row(1, 3), row(1, 2)])
    assert not _compare(row(1, 2), [row(1, 3), row(1, 4)])
    assert not _compare(row(1, 2), [])
