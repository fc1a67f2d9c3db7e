"""A trainer whose ranks share a model, between real engines: four ranks, tensor-parallel pairs in two pipeline stages.

Its weights go through files only, as differences, to two engines of one host.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.weight_sync.version_store import read_manifest
from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_loop import grpo_flags

HOOK = Path(__file__).with_name("weight_hook.py")


@pytest.fixture(scope="module")
def sharded_run(tiny_task, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("sharded")
    flags = grpo_flags(
        *(tiny_task, output, "--num-rollout", 3, "--actor-num-gpus-per-node", 4, "--rollout-num-gpus", 2),
        *("--tensor-model-parallel-size", 2, "--sequence-parallel", "--pipeline-model-parallel-size", 2),
        *("--update-weight-mode", "delta", "--update-weight-transport", "disk"),
        *("--update-weight-disk-dir", output / "shared", "--update-weight-local-checkpoint-dir", output / "local"),
        *("--check-weight-update-equal", "--custom-update-weight-post-write-path", f"{HOOK}:note_version"),
        *("--save-hf", output / "hf_{rollout_id}", "--save", output / "checkpoints", "--save-interval", 3),
    )
    result = run_train(flags, output)
    assert result.status == 0, result.output[-4000:]
    assert result.survivors() == []
    return output


def test_engines_get_the_whole_model_and_agree_with_the_trainer_on_every_token(sharded_run):
    differences = values(metrics(sharded_run / "run"), "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 3
    assert 0 < max(differences) < 1e-4, differences


def test_the_export_of_a_sharded_model_is_complete(sharded_run):
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        sharded_run / "hf_2", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_engines_follow_the_trainer_through_differences(sharded_run):
    densities = values(metrics(sharded_run / "run"), "perf/update_weights_density")
    assert densities
    assert all(0 < density <= 1 for density in densities)
    state = json.loads((sharded_run / "local" / ".weight_sync" / "state.json").read_text())
    assert (state["version"], state["is_whole"]) == (3, True)
    log = (sharded_run / "run" / "run.log").read_text()
    # in fp32 most bytes change with every step: two differences are as large as everything, then all is sent again
    assert "weight version 1: " in log
    assert [path.name for path in (sharded_run / "shared").glob("weight_v*")] == ["weight_v000003"]
    assert not read_manifest(sharded_run / "shared" / "weight_v000003").is_delta


def test_the_users_function_sees_every_version_on_every_trainer_rank(sharded_run):
    seen = sorted((sharded_run / "shared").glob("seen_*"))
    assert [path.read_text() for path in seen] == ["2 engines"] * len(seen)
    assert {path.name.rpartition("_")[0] for path in seen} == {f"seen_weight_v00000{n}" for n in range(4)}
    assert len(seen) == 4 * 4
