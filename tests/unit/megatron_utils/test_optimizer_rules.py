"""Rules of the optimizer and of FP8: valid combinations, and requirements on the machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.backends.megatron_utils.optimizer_rules import low_precision_here
from slime.utils import accelerator
from tests.unit.megatron_utils.command_lines import problems_of, resolved, write_config
from tests.unit.megatron_utils.hub_models import QWEN3_4B, QWEN3_30B

_OFFLOAD = "--optimizer-cpu-offload --use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("words", "world_size", "message"),
    [
        (
            "--num-distributed-optimizer-instances 3",
            4,
            "instances 3 must divide the 4 data- and context-parallel ranks",
        ),
        (
            "--num-distributed-optimizer-instances 4 --expert-model-parallel-size 4",
            8,
            "must divide the 2 copies of an expert",
        ),
        (
            "--num-distributed-optimizer-instances 2 --optimizer sgd",
            2,
            "instances 2 needs --use-distributed-optimizer",
        ),
        ("--num-distributed-optimizer-instances 0", 2, "0 must be at least 1"),
        ("--optimizer muon --use-distributed-optimizer", 2, "works with --optimizer adam only: drop it for muon"),
        ("--optimizer muon --fp16", 1, "--optimizer muon does not work with --fp16"),
        ("--optimizer dist_muon --fp32", 1, "--optimizer dist_muon does not work with --fp32"),
        (
            "--optimizer muon --tensor-model-parallel-size 8 --sequence-parallel",
            8,
            "8 tensor-parallel ranks cut the 4 key heads",
        ),
        ("--optimizer-cpu-offload", 1, "needs --use-precision-aware-optimizer"),
        (f"{_OFFLOAD} --optimizer-offload-fraction 1.5", 1, "1.5 must be between 0 and 1"),
        ("--optimizer-offload-fraction 0.5", 1, "0.5 needs --optimizer-cpu-offload"),
        (f"{_OFFLOAD} --optimizer sgd", 1, "needs --optimizer adam and --use-distributed-optimizer"),
        (f"{_OFFLOAD} --fp16", 1, "with --fp16 needs --accumulate-allreduce-grads-in-fp32"),
        ("--overlap-param-gather", 2, "--overlap-param-gather needs --overlap-grad-reduce"),
        (
            "--overlap-param-gather --overlap-grad-reduce --optimizer sgd",
            2,
            "--overlap-param-gather needs --use-distributed-optimizer",
        ),
        ("--ddp-bucket-size 0", 2, "--ddp-bucket-size 0 must be at least 1"),
        ("--moe-use-upcycling", 1, "run tools/upcycle_hf.py once, give its result as --hf-checkpoint"),
        ("--rampup-batch-size 16 16 1000", 1, "--rampup-batch-size 16 16 1000 has no meaning here"),
        ("--fp8-format e4m3 --transformer-impl local", 1, "needs --transformer-impl transformer_engine, not local"),
        ("--transformer-impl inference_optimized", 1, "is for inference, and this trainer does not have it"),
        (
            "--transformer-impl transformer_engine --megatron-deepgemm-forward-layers 0",
            1,
            "--transformer-impl transformer_engine and --megatron-deepgemm-forward-layers exclude each other",
        ),
        (
            "--transformer-impl transformer_engine --megatron-deepgemm-moe-forward-layers 0",
            1,
            "--transformer-impl transformer_engine and --megatron-deepgemm-moe-forward-layers exclude each other",
        ),
        ("--fp8-recipe blockwise", 1, "--fp8-recipe blockwise needs --fp8-format"),
        ("--fp8-param-gather", 1, "--fp8-param-gather needs --fp8-format"),
        ("--fp8-quantizer-factory a.b", 1, "--fp8-quantizer-factory a.b needs --fp8-format"),
    ],
)
def test_settings_of_the_optimizer_that_cannot_work_are_named(
    words: str, world_size: int, message: str, tmp_path: Path
) -> None:
    hf = write_config(tmp_path / "hf", QWEN3_30B)
    problems = problems_of(hf, words.split(), world_size=world_size)
    assert len(problems) == 1, problems
    assert message in problems[0]


@pytest.mark.parametrize(
    ("words", "world_size"),
    [
        ("--num-distributed-optimizer-instances 2 --expert-model-parallel-size 4", 8),
        ("--optimizer muon --muon-extra-scale-factor 0.2", 2),
        ("--optimizer dist_muon --no-muon-split-qkv --tensor-model-parallel-size 8 --sequence-parallel", 8),
        (f"{_OFFLOAD} --overlap-cpu-optimizer-d2h-h2d --optimizer-offload-fraction 0.5", 2),
        (f"{_OFFLOAD} --fp16 --accumulate-allreduce-grads-in-fp32", 1),
        ("--recompute-loss-function --fp16-lm-cross-entropy", 1),
    ],
)
def test_what_works_is_no_problem(words: str, world_size: int, tmp_path: Path) -> None:
    hf = write_config(tmp_path / "hf", QWEN3_30B)
    assert problems_of(hf, words.split(), world_size=world_size) == []


def test_fp8_asks_for_a_gpu_and_then_for_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = write_config(tmp_path / "hf", QWEN3_4B)
    words = ["--fp8-format", "hybrid"]
    assert problems_of(hf, words) == []
    args = resolved(hf, words)
    (problem,) = low_precision_here(args)
    assert problem.startswith("--fp8-format hybrid needs a GPU with TransformerEngine; this machine has none.")
    monkeypatch.setattr(accelerator, "current", lambda: SimpleNamespace(is_cpu=False))
    (problem,) = low_precision_here(args)
    assert "needs the package transformer_engine" in problem
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    version = importlib.metadata.version
    for found, is_supported in (
        ("2.8.0", False),
        ("2.9.0", True),
        ("2.11.1", True),
        ("2.12.0", False),
        ("2.20", False),
    ):
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name, found=found: version(name) if "core" in name else found
        )
        problems = list(low_precision_here(args))
        assert len(problems) == (not is_supported)
        for problem in problems:
            assert "needs transformer-engine <2.12.0,>=2.9.0a0, the versions that megatron-core 0.16.1" in problem
            assert f"and {found} is installed: pip install --no-build-isolation" in problem
        layers = resolved(hf, ["--transformer-impl", "transformer_engine"])
        assert len(list(low_precision_here(layers))) == len(problems)
    monkeypatch.undo()
    (problem,) = problems_of(hf, [*words, "--fp32"])
    assert "is for weights in bf16" in problem
    assert problems_of(hf, [*words, "--fp8-param-gather"]) == []
    (problem,) = problems_of(hf, [*words, "--fp8-param-gather", "--optimizer", "sgd"])
    assert "--fp8-param-gather needs --optimizer adam and --use-distributed-optimizer" in problem
    (problem,) = problems_of(hf, [*words, "--fp8-param-gather", "--fp8-recipe", "mxfp8"])
    assert "--fp8-param-gather is not supported with --fp8-recipe mxfp8" in problem
    (problem,) = problems_of(hf, [*words, "--fp8-param-gather", *_OFFLOAD.split()])
    assert "exclude each other" in problem
    custom, factory = ["--fp8-recipe", "custom"], ["--fp8-quantizer-factory", "some.module.function"]
    assert problems_of(hf, [*words, *custom, *factory]) == []
    for lonely in (custom, factory):
        (problem,) = problems_of(hf, [*words, *lonely])
        assert "need each other" in problem
