"""Adapters on every parallel layout train like on one rank, and a checkpoint of them continues on another layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.models.hf_shape import read_shape
from slime.models.lora import FILE_PREFIX, WEIGHTS_FILE, LoraConfig, adapter_tensors
from tests.dist.comparison import NASTY, PLAIN, Result, assert_equal, assert_replicas_agree, layout_args, main_rank
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_batch

LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora_experts": True}


def make_adapter(hf: Path, path: Path) -> Path:
    """A peft adapter of the model in ``hf`` whose tensors are all random: B would begin as zeros."""
    path.mkdir()
    generator = torch.Generator().manual_seed(2)
    names = adapter_tensors(read_shape(str(hf)), LoraConfig(4, experts=True))
    tensors = {FILE_PREFIX + name: 0.2 * torch.randn(sizes, generator=generator) for name, sizes in names.items()}
    save_file(tensors, path / WEIGHTS_FILE, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def train(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Result]]:
    directory = tmp_path_factory.mktemp("lora_layouts")
    batch = make_batch(16, seed=1, lengths=NASTY)
    references: dict[str, list[Result]] = {}

    def run(family: str, world_size: int, layout: str, **settings: Any) -> list[Result]:
        hf, adapter = directory / family, directory / f"{family}_adapter"
        if world_size == 1 and family in references:
            return references[family]
        if not hf.exists():
            kind, *deeper = family.split(" x ")
            make_family_checkpoint(kind, hf, **({"num_hidden_layers": int(deeper[0])} if deeper else {}))
            make_adapter(hf, adapter)
        args = PLAIN | LORA | {"lora_adapter_path": str(adapter), "output_dir": str(directory)} | layout_args(layout)
        args |= settings
        size = args.pop("size", 3)
        case = {"hf": str(hf), "batch": batch, "num_steps": 2, "args": args, "size": size}
        results = ranks.run("tests.dist.layout_cases:train", world_size, **case)
        if world_size == 1:
            references[family] = results
        return results

    return run


@pytest.mark.parametrize(
    ("family", "world_size", "layout"),
    [
        ("qwen3", 2, "tp2"),
        ("qwen3", 2, "tp2 sp distopt"),
        ("qwen3", 4, "pp2 first1 cp2"),
        ("qwen3 x 4", 2, "pp2 vpp2 size2"),
        ("glm4", 2, "tp2 sp"),  # gate and up are one Hugging Face layer
        ("qwen3_moe", 2, "ep2 distopt"),
        ("qwen3_moe", 4, "tp2 sp ep2 etp1 pp2 first1"),
        ("deepseek_v3", 2, "tp2 sp ep2 etp1"),
        ("qwen3_next", 2, "tp2 sp ep2 etp1"),
    ],
)
def test_adapters_train_like_on_one_rank(
    family: str, world_size: int, layout: str, train: Callable[..., list[Result]]
) -> None:
    results = train(family, world_size, layout)
    assert_equal(main_rank(train(family, 1, "size16")), results)
    assert_replicas_agree(results)
    assert all(".lora_" in name for name in results[0]["weights"])


def test_a_pass_waits_for_gathers_of_adapters_that_overlap_it(train: Callable[..., list[Result]]) -> None:
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1000}
    results = train("qwen3", 2, "distopt", **overlap)
    assert_equal(main_rank(train("qwen3", 1, "size16")), results)
    assert_replicas_agree(results)


@pytest.mark.parametrize("layout", ["tp2", "tp2 sp"])
def test_dropout_keeps_the_copies_of_tensor_ranks_equal(layout: str, ranks: ForkServer, tmp_path: Path) -> None:
    make_family_checkpoint("qwen3", tmp_path / "hf")
    args = PLAIN | LORA | {"lora_dropout": 0.3, "output_dir": str(tmp_path)} | layout_args(layout)
    case = {"hf": str(tmp_path / "hf"), "batch": make_batch(16, seed=1, lengths=NASTY), "num_steps": 2, "args": args}
    results = ranks.run("tests.dist.layout_cases:train", 2, **case)
    assert_replicas_agree(results)
    assert any(weight.any() for name, weight in results[0]["weights"].items() if ".lora_B." in name)


@pytest.mark.parametrize("layout", ["pp2 first1", "pp2 first1 distopt"])
def test_a_pipeline_stage_may_have_no_adapter(layout: str, ranks: ForkServer, tmp_path: Path) -> None:
    make_family_checkpoint("qwen3_next", tmp_path / "hf")  # the first layer is a gated delta net
    batch, results = make_batch(16, seed=1, lengths=NASTY), []
    for world_size, words in ((1, "size16"), (2, layout)):
        args = PLAIN | LORA | {"lora_target_modules": ["q_proj"], "output_dir": str(tmp_path)} | layout_args(words)
        case = {"hf": str(tmp_path / "hf"), "batch": batch, "num_steps": 2, "size": args.pop("size", 3), "args": args}
        results.append(ranks.run("tests.dist.layout_cases:train", world_size, **case))
    assert_equal(main_rank(results[0]), results[1])


_CASE = "tests.dist.checkpoint_cases:run"
_COMMON = {"lr": 1e-3, "weight_decay": 0.1, "num_rollout": 10, **LORA}


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        ("qwen3", (2, "tp2 sp distopt"), (2, "pp2 first1 distopt")),
        ("qwen3", (1, "distopt"), (2, "tp2 distopt")),
        ("qwen3_moe", (2, "ep2 distopt"), (2, "ep2 tp2 sp etp1 distopt")),
    ],
)
def test_adapters_that_are_saved_on_one_layout_continue_on_another(
    family: str, saved: tuple[int, str], loaded: tuple[int, str], ranks: ForkServer, tmp_path: Path
) -> None:
    hf = tmp_path / "hf"
    make_family_checkpoint(family, hf)
    (straight,) = ranks.run(_CASE, 1, hf=str(hf), args=_COMMON, rollouts=[0, 1, 2], save_after=[])
    size, layout = saved
    args = _COMMON | layout_args(layout) | {"save": str(tmp_path / "ckpt")}
    first = ranks.run(_CASE, size, hf=str(hf), args=args, rollouts=[0, 1], save_after=[1])
    size, layout = loaded
    args = _COMMON | layout_args(layout) | {"load": str(tmp_path / "ckpt")}
    for result in ranks.run(_CASE, size, hf=str(hf), args=args, rollouts=[2], save_after=[]):
        assert result["error"] == ""
        assert result["start"] == 2
        for name, value in first[0]["weights"].items():
            assert torch.equal(result["weights_at_start"][name], value), name
        for name, value in straight["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=1e-4, msg=name)
