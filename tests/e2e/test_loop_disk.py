"""A whole run whose weights travel through files only, as differences, to two engines of one host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.weight_sync.version_store import read_manifest
from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_loop import grpo_flags

HOOK = Path(__file__).with_name("weight_hook.py")
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def delta_run(tiny_task, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("delta")
    flags = grpo_flags(
        *(tiny_task, output, "--num-rollout", 3, "--rollout-num-gpus", 2, "--tensor-model-parallel-size", 2),
        *("--update-weight-mode", "delta", "--update-weight-transport", "disk"),
        *("--update-weight-disk-dir", output / "shared", "--update-weight-local-checkpoint-dir", output / "local"),
        *("--check-weight-update-equal", "--custom-update-weight-post-write-path", f"{HOOK}:note_version"),
    )
    result = run_train(flags, output)
    assert result.status == 0, result.output[-4000:]
    assert result.survivors() == []
    return output


def test_engines_follow_the_trainer_through_differences(delta_run):
    differences = values(metrics(delta_run / "run"), "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 3
    assert max(differences) < 1e-5
    densities = values(metrics(delta_run / "run"), "perf/update_weights_density")
    assert densities
    assert all(0 < density <= 1 for density in densities)
    state = json.loads((delta_run / "local" / ".weight_sync" / "state.json").read_text())
    assert (state["version"], state["is_whole"]) == (3, True)
    log = next(delta_run.glob("train-*.log")).read_text()
    # in fp32 most bytes change with every step: two differences are as large as everything, then all is sent again
    assert "weight version 1: " in log
    assert [path.name for path in (delta_run / "shared").glob("weight_v*")] == ["weight_v000003"]
    assert not read_manifest(delta_run / "shared" / "weight_v000003").is_delta


def test_the_users_function_sees_every_version_on_every_trainer_rank(delta_run):
    seen = sorted((delta_run / "shared").glob("seen_*"))
    assert [path.read_text() for path in seen] == ["2 engines"] * len(seen)
    assert {path.name.rpartition("_")[0] for path in seen} == {f"seen_weight_v00000{n}" for n in range(4)}
    assert len(seen) == 8
