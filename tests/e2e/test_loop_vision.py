"""Images on the real stack: an engine and the trainer see them alike, and the tower's weights travel with the rest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from examples.tiny.vision import make_vision_model
from slime.data.dump_file import load_saved
from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_loop import grpo_flags
from tests.e2e.vision_task import make_vision_prompts


def test_engine_and_trainer_agree_on_prompts_with_images_while_all_weights_learn(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    make_vision_model(checkpoint)
    task = SimpleNamespace(model=checkpoint, train=make_vision_prompts(tmp_path / "train.jsonl", 12))
    flags = grpo_flags(
        *(task, tmp_path, "--input-key", "prompt", "--multimodal-keys", '{"image": "images"}', "--num-rollout", 2),
        *("--rollout-batch-size", 6, "--n-samples-per-prompt", 4, "--tensor-model-parallel-size", 2),
        *("--sequence-parallel", "--check-weight-update-equal", "--save-hf", tmp_path / "hf_{rollout_id}"),
        *("--save", tmp_path / "checkpoints", "--save-interval", 2),
        *("--save-debug-rollout-data", tmp_path / "dump" / "{rollout_id}.pt"),
    )
    finished = run_train(flags, tmp_path)
    assert finished.status == 0, finished.output[-4000:]
    assert max(values(metrics(tmp_path / "run"), "train/train_rollout_logprob_abs_diff")) < 1e-4
    samples = load_saved(tmp_path / "dump" / "1.pt")["samples"]
    assert {sample["prompt"].count("<|image_pad|>") for sample in samples} == {0, 1, 2}

    before, after = load_file(checkpoint / "model.safetensors"), {}
    for file in (tmp_path / "hf_1").glob("*.safetensors"):
        after |= load_file(file)
    assert after.keys() == before.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
