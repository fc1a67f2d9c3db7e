"""Images on the real stack: an engine and the trainer see them alike, and the tower's weights travel with the rest.

An example's environment answers with a larger picture.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from examples.tiny.recipe import write_rows
from examples.tiny.vision import AREA_FLAGS, area_problem, as_text, make_vision_model
from slime.data.dump_file import load_saved
from tests.e2e.running import ROOT, metrics, run_train, values
from tests.e2e.test_loop import grpo_flags
from tests.e2e.vision_task import make_vision_prompts


def test_engine_and_trainer_agree_on_images_of_prompts_and_environments_while_all_weights_learn(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    make_vision_model(checkpoint)
    problems = (area_problem(random.Random(seed)) for seed in range(6))
    question = [{"role": "user", "content": "<image>area?"}]
    rows = [{"prompt": question, "images": [as_text(image)], "label": area} for image, area in problems]
    rows += map(json.loads, Path(make_vision_prompts(tmp_path / "others.jsonl", 6)).read_text().splitlines())
    task = SimpleNamespace(model=checkpoint, train=write_rows(tmp_path / "train.jsonl", rows))
    flags = grpo_flags(
        *(task, tmp_path, *AREA_FLAGS, "--input-key", "prompt", "--num-rollout", 2, "--rollout-batch-size", 6),
        *("--custom-generate-function-path", "examples.geo3k_vlm_multi_turn.rollout.generate", "--max-turns", 2),
        *("--custom-config-path", ROOT / "examples" / "geo3k_vlm_multi_turn" / "geo3k.yaml"),
        *("--rollout-max-response-len", 96, "--rollout-stop-token-ids", *range(66, 76)),  # the letters a to j
        *("--tensor-model-parallel-size", 2, "--sequence-parallel", "--sglang-context-length", 256),
        *("--check-weight-update-equal", "--save-hf", tmp_path / "hf_{rollout_id}"),
        *("--save", tmp_path / "checkpoints", "--save-interval", 2, "--entropy-coef", 0.01),
        *("--save-debug-rollout-data", tmp_path / "dump" / "{rollout_id}.pt"),
    )
    finished = run_train(flags, tmp_path)
    assert finished.status == 0, finished.output[-4000:]
    assert max(values(metrics(tmp_path / "run"), "train/train_rollout_logprob_abs_diff")) < 1e-4
    samples = [sample for number in range(2) for sample in load_saved(tmp_path / "dump" / f"{number}.pt")["samples"]]
    assert {sample["prompt"].count("<|image_pad|>") for sample in samples} == {0, 1, 2}
    again = [sample for sample in samples if sample["metadata"].get("turn") and "area?" in sample["prompt"]]
    assert again, "no sample reached its second turn"
    for sample in again:
        assert "<user><|vision_start|><|image_pad|><|vision_end|>no. area?<assistant>" in sample["response"]
        # 16 tokens of the larger picture, its two marks, the message and the next turn's beginning
        assert sample["loss_mask"].count(0) == 16 + 2 + len("<user>no. area?<assistant>")

    before, after = load_file(checkpoint / "model.safetensors"), {}
    for file in (tmp_path / "hf_1").glob("*.safetensors"):
        after |= load_file(file)
    assert after.keys() == before.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
