"""The real stack with ``--lora-rank`` on a CPU: adapters are trained, sent, proved and served, by both backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_loop import grpo_flags

_LORA = ("--lora-rank", 8, "--lora-alpha", 32, "--lr", "1e-2", "--min-lr", "1e-2")


@pytest.fixture(scope="module", params=["fsdp", "megatron"])
def run(request, tiny_task, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp(request.param)
    flags = grpo_flags(
        *(tiny_task, output, *_LORA, "--train-backend", request.param, "--num-rollout", 5),
        *("--save-hf", output / "hf_{rollout_id}", "--check-weight-update-equal"),
    )
    result = run_train(flags, output)
    assert result.status == 0, result.output[-4000:]
    assert result.survivors() == []
    return output


def test_adapters_learn_and_agree_with_the_engine_on_every_token(run, tiny_task):
    records = metrics(run / "run")
    rewards = values(records, "rollout/raw_reward")
    assert len(rewards) == 5
    assert max(rewards) > rewards[0] + 0.05, rewards  # the large steps of so short a run may go too far at its end
    differences = values(records, "train/train_rollout_logprob_abs_diff")
    assert 0 < max(differences) < 1e-4, differences
    # the base travels before the first rollout only
    base = sum(file.stat().st_size for file in Path(tiny_task.model).glob("*.safetensors"))
    assert max(values(records, "perf/update_weights_bytes")[1:]) < 0.2 * base


def test_the_export_is_an_adapter_that_peft_loads(run, tiny_task):
    config = json.loads((run / "hf_4" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 32)
    model = AutoModelForCausalLM.from_pretrained(tiny_task.model)
    loaded = PeftModel.from_pretrained(model, run / "hf_4")
    changed = [value for name, value in loaded.named_parameters() if ".lora_B." in name]
    assert len(changed) == 7 * model.config.num_hidden_layers
    assert all(value.any() for value in changed)
