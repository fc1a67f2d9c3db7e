"""Engines of a run with adapters: start-up flags, and combinations that are refused."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.feature_rules import (
    adapter_flags,
    adapter_of_model,
    experts_on_cpu,
    problems_of_server,
    served_adapter,
)
from slime.backends.sglang_utils.topology import ModelSpec, ServerGroupSpec, WorkerType
from slime.config.groups import from_args
from slime.data.engine_fields import FieldFlags
from slime.utils import accelerator
from slime.utils.accelerator import CUDAAccelerator
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.sglang_utils.test_server_args import argv, value

LORA = {
    "lora_rank": 8,
    "lora_alpha": 16.0,
    "lora_dropout": 0.0,
    "lora_target_modules": None,
    "lora_adapter_path": None,
    "lora_experts": False,
    "lora_use_rslora": False,
    "lora_merge": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_family_checkpoint("qwen3", path)
    return str(path)


def run(model: str, **changes: Any) -> Namespace:
    values = LORA | {"hf_checkpoint": model, "debug_train_only": False, "train_backend": "megatron"}
    values |= {
        "debug_rollout_only": False,
        "notices": [],
        "sglang_quantization": None,
        "sglang_dp_size": 1,
        "update_weight_mode": "full",
    }
    return Namespace(**values | changes, given=frozenset(changes))


def test_an_engine_of_a_run_with_adapters_is_started_for_them(model: str, monkeypatch: pytest.MonkeyPatch):
    words = argv(**LORA | {"hf_checkpoint": model})
    assert "--enable-lora" in words
    assert (value(words, "--max-lora-rank"), value(words, "--max-loras-per-batch")) == ("8", "2")
    first = words.index("--lora-target-modules") + 1
    assert words[first : first + 7] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert value(words, "--lora-backend") == "torch_native"
    monkeypatch.setattr(accelerator, "current", CUDAAccelerator)
    assert "--lora-backend" not in adapter_flags(run(model))


def test_users_flags_win_and_other_models_have_no_adapters(model: str):
    lora = LORA | {"hf_checkpoint": model}
    words = argv("--max-loras-per-batch", "4", "--lora-backend", "triton", **lora)
    assert (words.count("--max-loras-per-batch"), words.count("--lora-backend")) == (1, 1)
    assert "--enable-lora" not in argv(overrides={"model_path": "/another"}, **lora)
    assert "--enable-lora" in argv(overrides={"model_path": model}, **lora)
    assert "--enable-lora" not in argv(**lora | {"lora_merge": True})
    assert "--enable-lora" not in argv(**lora | {"lora_rank": 0})


def test_an_engine_that_gives_its_memory_away_keeps_a_copy_of_the_base(model: str):
    assert "--enable-weights-cpu-backup" in argv(offload_rollout=True, **LORA | {"hf_checkpoint": model})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lora_target_modules": ["q_proj", "k_proj"]}, "k_proj without v_proj: SGLang fuses these layers"),
        ({"lora_target_modules": ["up_proj"]}, "up_proj without gate_proj"),
        ({"sglang_max_lora_rank": 4}, "--sglang-max-lora-rank 4 is less than --lora-rank 8"),
        ({"sglang_max_loras_per_batch": 1}, "--sglang-max-loras-per-batch 1 must be at least 2"),
        ({"sglang_lora_target_modules": ["q_proj"]}, "lacks down_proj, gate_proj, k_proj"),
        ({"sglang_lora_paths": ["/a"]}, "a run serves one adapter, 'policy'"),
        ({"sglang_dp_size": 2}, "--sglang-dp-size 2 does not work with --lora-rank"),
        ({"sglang_tokenizer_worker_num": 2}, "--sglang-tokenizer-worker-num 2 does not work with --lora-rank"),
        ({"update_weight_mode": "delta"}, "--update-weight-mode delta does not work with --lora-rank"),
        ({"sglang_quantization": "fp8"}, "does not serve adapters of quantized engines"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_flag_that_contradicts_the_adapter_is_named_with_its_fix(model: str, changes: dict[str, Any], problem: str):
    (found, *_) = served_adapter(run(model, **changes))
    assert problem in found
    assert any(fix in found for fix in ("--lora-merge", "leave it out", "Leave it out", "at least 2"))
    assert list(served_adapter(run(model, **changes, lora_merge=True))) == []


@pytest.mark.parametrize("names", [["q_proj", "v_proj"], ["o_proj"], ["gate_proj"], None])
def test_layers_that_the_engine_can_serve_are_no_problem(model: str, names: list[str] | None):
    assert list(served_adapter(run(model, lora_target_modules=names))) == []


def entry(path: str, *, is_trained: bool = True, **overrides: Any) -> ModelSpec:
    """A model of --sglang-config."""
    groups = (ServerGroupSpec(WorkerType.REGULAR, 1, 1, {}), ServerGroupSpec(WorkerType.REGULAR, 1, 1, overrides))
    return ModelSpec("a", path, is_trained, groups)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"lora_paths": ["/a"]}, "overrides: lora_paths does not work with --lora-rank: a run serves one adapter"),
        ({"max_lora_rank": 4}, "overrides: max_lora_rank 4 is less than --lora-rank 8"),
        ({"max_loras_per_batch": 1}, "overrides: max_loras_per_batch 1 must be at least 2"),
        ({"lora_target_modules": ["q_proj"]}, "overrides: lora_target_modules q_proj lacks down_proj, gate_proj"),
        ({"enable_lora": False}, "overrides: enable_lora false does not work with --lora-rank"),
        ({"tokenizer_worker_num": 2}, "overrides: tokenizer_worker_num 2 does not work with --lora-rank"),
        ({"dp_size": 2}, "overrides: dp_size 2 does not work with --lora-rank"),
        ({"quantization": "fp8"}, "overrides: quantization fp8: slime does not serve adapters of quantized engines"),
        ({"context_length": 100, "max_lora_rank": 16}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_group_of_engines_that_contradicts_the_adapter_is_named(
    model: str, overrides: dict[str, Any], problem: str | None
):
    args = run(model)
    assert [found[: len(problem or "")] for found in adapter_of_model(args, entry(model, **overrides))] == (
        [problem] if problem else []
    )
    assert list(adapter_of_model(args, entry("/judge", is_trained=False, **overrides))) == []
    assert list(adapter_of_model(run(model, lora_merge=True), entry(model, **overrides))) == []


def test_engines_of_another_base_cannot_serve_the_adapter(model: str):
    (problem,) = adapter_of_model(run(model), entry("/fp8"))
    assert problem.startswith(f"model_path /fp8 with update_weights: an adapter of --hf-checkpoint {model} is trained")


def test_experts_need_a_gpu(tmp_path: Path):
    make_family_checkpoint("qwen3_moe", tmp_path)
    (problem,) = experts_on_cpu(run(str(tmp_path), lora_experts=True))
    assert "engines on a CPU cannot serve adapters of the MLPs of a model with experts" in problem
    assert list(experts_on_cpu(run(str(tmp_path)))) == []


def test_without_a_trainer_engines_serve_the_base(model: str):
    args = run(model, debug_rollout_only=True)
    assert from_args(FieldFlags, args).adapter_fields == {}
    assert list(served_adapter(args)) == []
    assert "--debug-rollout-only" in str(args.notices)


def test_a_server_of_others_must_have_been_started_for_the_adapter(model: str):
    args, good = run(model), {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 2}
    good["lora_target_modules"] = adapter_flags(args)["--lora-target-modules"]
    assert list(problems_of_server(args, good)) == []
    (problem,) = problems_of_server(args, {"enable_lora": None})
    assert problem.startswith("it serves no adapters: start it with --enable-lora --max-lora-rank 8")
    for change in ({"max_lora_rank": 4}, {"lora_target_modules": ["q_proj"]}, {"max_loras_per_batch": 1}):
        (problem,) = problems_of_server(args, good | change)
        assert "start it with --enable-lora" in problem
    (problem,) = problems_of_server(args, good | {"tokenizer_worker_num": 2})
    assert "start it without --tokenizer-worker-num" in problem
    assert list(problems_of_server(run(model, lora_rank=0), {})) == []
