"""The real stack with ``--lora-rank`` on a CPU: adapters are trained, sent, proved and served, by both backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from slime.data.engine_fields import ADAPTER_NAME
from tests.e2e.running import PLUGINS, Finished, metrics, run_train, values
from tests.e2e.test_loop import grpo_flags
from tests.e2e.watching import is_generating, read, running, server_of

ROLLOUTS = 5
_LORA = ("--lora-rank", 8, "--lora-alpha", 32, "--lr", "1e-2", "--min-lr", "1e-2")


def flags_for(task: Any, output: Path, backend: str, *more: Any) -> list[Any]:
    flags = grpo_flags(
        *(task, output, *_LORA, "--train-backend", backend, "--num-rollout", ROLLOUTS, *more),
        *("--save-hf", output / "hf_{rollout_id}", "--check-weight-update-equal"),
    )
    if "--colocate" in more:
        del flags[(i := flags.index("--rollout-num-gpus")) : i + 2]
    return flags


def with_a_death(flags: list[Any], output: Path) -> Finished:
    """The run with ``flags``, whose only engine is killed when it serves an adapter that was trained."""
    flags += ["--custom-generate-function-path", f"{PLUGINS}:generate_while_held", "--use-fault-tolerance"]
    hold = output / "hold"
    hold.write_text("1")  # the second rollout goes on until the engine is back
    with running([*flags, "--rollout-health-check-interval", 1], output) as run:
        _, engine = run.urls()
        run.wait(lambda: run.num_trained() >= 1 and is_generating(engine))
        server_of(engine).kill()
        run.wait(lambda: "engine 0 serves again" in run.text())
        models = run.wait(lambda: read(f"{run.last_url(0)}/v1/models"))["data"]
        assert ADAPTER_NAME in [model["id"] for model in models], "it serves when it has base and adapter"
        hold.unlink()
        return run.end()


@pytest.fixture(scope="module", params=["fsdp, an engine dies", "megatron --colocate"])
def run(request, tiny_task, tmp_path_factory) -> Path:
    backend, _, more = request.param.partition(" ")
    output = tmp_path_factory.mktemp("run")
    if backend == "fsdp,":
        result = with_a_death(flags_for(tiny_task, output, "fsdp"), output)
    else:
        result = run_train(flags_for(tiny_task, output, backend, more), output)
    assert result.status == 0, result.output[-4000:]
    assert result.survivors() == []
    return output


def test_adapters_learn_and_agree_with_the_engine_on_every_token(run, tiny_task):
    records = metrics(run / "run")
    rewards = values(records, "rollout/raw_reward")
    assert len(rewards) == ROLLOUTS
    assert max(rewards) > rewards[0] + 0.05, rewards  # the large steps of so short a run may go too far at its end
    differences = values(records, "train/train_rollout_logprob_abs_diff")
    assert len(differences) == len(values(records, "train/loss")) == ROLLOUTS, "one per step"
    assert 0 < max(differences) < 1e-4, differences
    # the base travels before the first rollout, and to an engine that has restarted
    base = sum(file.stat().st_size for file in Path(tiny_task.model).glob("*.safetensors"))
    sizes = values(records, "perf/update_weights_bytes")
    assert sum(size > 0.2 * base for size in sizes[1:]) <= 1, sizes


def test_the_export_is_an_adapter_that_peft_loads(run, tiny_task):
    config = json.loads((run / "hf_4" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 32)
    model = AutoModelForCausalLM.from_pretrained(tiny_task.model)
    loaded = PeftModel.from_pretrained(model, run / "hf_4")
    changed = [value for name, value in loaded.named_parameters() if ".lora_B." in name]
    assert len(changed) == 7 * model.config.num_hidden_layers
    assert all(value.any() for value in changed)


def test_merged_weights_travel_as_weights_and_agree_with_the_engine(tiny_task, tmp_path):
    flags = flags_for(tiny_task, tmp_path, "megatron", "--lora-merge", "--tensor-model-parallel-size", 2)
    result = run_train([*flags, "--num-rollout", 2], tmp_path)
    assert result.status == 0, result.output[-4000:]
    records = metrics(tmp_path / "run")
    differences = values(records, "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert 0 < max(differences) < 1e-4, differences
    base = AutoModelForCausalLM.from_pretrained(tiny_task.model).state_dict()
    sizes = values(records, "perf/update_weights_bytes")
    assert len(set(sizes)) == 1, "whole weights at every sync"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf_1").state_dict()
    assert [name for name in base if ".q_proj." in name and torch.equal(base[name], merged[name])] == []
