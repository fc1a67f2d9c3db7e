"""Runs with adapters on shared devices: those that cannot fit are refused before the start, and no other."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.cli import main
from slime.config.plan import build
from slime.config.plan.devices import colocation_problems, gpu_bytes
from slime.ray import placement_group, rules
from slime.ray.arguments import machine_problems
from slime.ray.placement_group import GpuSlots, create_placement_groups
from slime.utils.errors import ConfigError
from tests.unit.config.tiny_command import QWEN3, TinyCommand, make_model

GIB = 2**30
QWEN3_30B = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
"""30.5 billion parameters: 56.9 GiB in bf16."""
SHORT = {
    "TP": "--expert-tensor-parallel-size 1 --sequence-parallel --tensor-model-parallel-size ",
    "EP": "--expert-model-parallel-size ",
    "PP": "--pipeline-model-parallel-size ",
    "WIDTH": "--rollout-num-gpus-per-engine",
}
LORA = "--colocate --lora-rank 32 --actor-num-gpus-per-node 8"
Make = Callable[..., Namespace]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    model = make_model(tmp_path / "model", QWEN3_30B)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1 = ", "label": "2"}\n' * 8)
    command = TinyCommand(tmp_path, model, str(prompts))
    taken = ("--rollout-num-gpus", "--actor-num-gpus-per-node", "--rm-type", "--num-rollout")
    words = f"{LORA} --rm-type math --num-rollout 2"

    def resolved(more: str = "") -> Namespace:
        for name, flag in SHORT.items():
            more = more.replace(name, flag)
        args, problems = command.run(*words.split(), *more.split(), without=taken)
        assert not problems, problems
        assert args is not None
        return args

    return resolved


def problem(args: Namespace, gib: float) -> str:
    (text,) = colocation_problems(args, round(gib * GIB))
    return text


def fits(args: Namespace, gib: float) -> bool:
    return not list(colocation_problems(args, round(gib * GIB)))


def test_weights_of_trainer_and_engine_that_never_fit_together_are_refused(make: Make) -> None:
    text = problem(make(), 80)
    assert text.startswith(
        "--colocate with --lora-rank 32: a device has 80 GiB, and during a weight sync it would hold"
    )
    assert (
        "hold 114 GiB: 56.9 GiB of the trainer (weights of a rank), 57.3 GiB of an engine (weights and adapters)"
        in text
    )
    assert "raise --tensor-model-parallel-size 1, --pipeline-model-parallel-size 1 or" in text
    assert "--rollout-num-gpus-per-engine 1, which divide the weights, or drop --colocate." in text
    assert fits(make(), 141), "an H200"


@pytest.mark.parametrize(
    "more",
    [
        "TP4 EP8 WIDTH 8",
        "TP4 EP8 WIDTH 8 --sglang-mem-fraction-static 0.9 --lora-experts --lora-merge",
        "TP2 EP4 WIDTH 4",
        "PP4 WIDTH 2",
        "TP8 EP8 WIDTH 4 --no-offload-train --sglang-mem-fraction-static 0.6",
        "--train-backend fsdp WIDTH 2",
        "--train-backend fsdp WIDTH 1 --sglang-mem-fraction-static 0.95",
    ],
)
def test_recipes_of_a_30b_model_on_eight_devices_of_80_gib_are_accepted(make: Make, more: str) -> None:
    assert fits(make(more), 80)


def test_a_trainer_that_stays_is_counted_with_the_share_of_the_engine(make: Make) -> None:
    layout = "TP4 EP4 WIDTH 8"
    stays = f"{layout} --no-offload-train --sglang-mem-fraction-static"
    text = problem(make(f"{stays} 0.9"), 80)
    assert "while engines generate it would hold" in text
    assert "To fit, drop --no-offload-train or lower --sglang-mem-fraction-static 0.9, or raise" in text
    assert fits(make(f"{stays} 0.7"), 80)
    assert fits(make(f"{layout} --sglang-mem-fraction-static 0.9"), 80), "the trainer leaves"
    assert fits(make(f"{layout} --no-offload-train"), 80), "SGLang chooses the fraction"
    assert fits(make(f"{stays} 0.9 --sglang-max-total-tokens 4096"), 80), "a small cache"
    assert fits(make(f"{stays} 0.9 --no-offload-rollout"), 80), "an engine beside the trainer takes what is free"


def test_an_engine_that_stays_is_counted_in_a_training_step(make: Make) -> None:
    text = problem(
        make("TP2 EP8 --no-offload-rollout"),
        56,
    )
    assert "in a training step it would hold" in text
    assert "To fit, drop --no-offload-rollout, or raise" in text


def test_fsdp_counts_the_divided_weights_only(make: Make) -> None:
    args = make("--train-backend fsdp")
    assert fits(args, 80)
    text = problem(args, 40)
    assert "7.1" in text
    assert "raise the 8 trainer ranks (--actor-num-gpus-per-node, --actor-num-nodes) or" in text


@pytest.mark.parametrize(
    "more",
    [
        "--fp32",
        "--sglang-cpu-offload-gb 40",
        "--debug-rollout-only",
        "--lora-rank 0",
    ],
)
def test_runs_of_unknown_size_and_without_adapters_are_never_refused(make: Make, more: str) -> None:
    assert fits(make(more), 4)


def test_quantized_checkpoints_and_unknown_devices_are_never_refused(make: Make) -> None:
    args = make()
    assert fits(args, 0)
    config = Path(args.hf_checkpoint) / "config.json"
    config.write_text(
        json.dumps(QWEN3_30B | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    )
    assert fits(make("--lora-merge"), 4)


def test_only_the_margin_is_above_the_device(make: Make) -> None:
    args = make("TP4 EP8 WIDTH 8")
    plan = build(args, title="t", device_bytes=80 * GIB)
    assert plan.engine is not None
    both = (plan.stages[0].weights + plan.engine.weights) / GIB
    assert fits(args, both / 1.049)
    assert not fits(args, both / 1.051)


def test_the_plan_for_given_devices_would_not_start(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hf-checkpoint", make().hf_checkpoint, *LORA.split(), "--num-rollout", "2", "--rollout-batch-size", "8"]
    words += ["--prompt-data", make().prompt_data, "--n-samples-per-prompt", "4", "--rm-type", "math"]
    assert main(["plan", "--json", "--device-memory-gb", "80", *words]) == 2
    (text,) = json.loads(capsys.readouterr().out)["problems"]
    assert text == problem(make(), 80)
    assert main(["plan", "--json", "--device-memory-gb", "141", *words]) == 0


def test_a_machine_judges_its_gpus_unless_it_leads_a_cluster(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    args = make()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(rules, "gpu_bytes", lambda: 80 * GIB)

    def find() -> list[str]:
        return [text for text in machine_problems(args) if text.startswith("--colocate")]

    assert find() == [], "without GPUs devices are processes"
    monkeypatch.setattr(rules.accelerator, "current", lambda: SimpleNamespace(is_cpu=False))
    assert find() == [problem(args, 80)]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert find() == []


def test_the_devices_of_a_cluster_are_judged_before_any_process_of_the_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, asked = [], []

    def reserve(count: int, timeout_s: float, *, asks_memory: bool) -> GpuSlots:
        asked.append(asks_memory)
        return GpuSlots(None, range(count), range(count), device_bytes=80 * GIB)

    monkeypatch.setattr(placement_group, "_reserve", reserve)
    monkeypatch.setattr(placement_group, "release_placement_groups", released.append)
    with pytest.raises(ConfigError, match="during a weight sync"):
        create_placement_groups(make())
    assert len(released) == 1
    create_placement_groups(make("--lora-rank 0"))
    assert (asked, len(released)) == ([True, False], 1)


def test_the_largest_gpu_counts_and_a_driver_without_answer_is_no_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_bytes() == 0, "without the program"
    for answer, size in (("echo 81559; echo 40960", 81559 * 2**20), ("echo '[N/A]'", 0), ("exit 9", 0)):
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)
        assert gpu_bytes() == size
    program.write_text('#!/bin/sh\n[ "$1" = --id=3 ] && echo 1024\n')
    assert gpu_bytes(3) == GIB
