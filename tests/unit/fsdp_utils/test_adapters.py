"""Adapters with the FSDP backend on one rank: trained alone, equal to peft, exported, saved and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from slime.backends.training.data import TrainBatch
from tests.unit.fsdp_utils.test_fsdp_trainer import _trainer, _two_steps
from tests.unit.megatron_utils.tiny_trainer import make_hf_model, single_rank

LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora_use_rslora": True, "lr": 1e-2}


@pytest.fixture(scope="module", autouse=True)
def _single_rank() -> Iterator[None]:
    with single_rank():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp_adapters")
    make_hf_model("qwen3", path, tie_word_embeddings=True)
    return path


@pytest.fixture
def trained(checkpoint: Path) -> Any:
    trainer = _trainer(checkpoint, use_kl_loss=True, kl_loss_coef=0.1, **LORA)
    trainer.train(0, _two_steps())
    return trainer


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    from slime.backends.fsdp_utils.step import run_model

    (micro_batch, *_) = TrainBatch(_two_steps(), torch.device("cpu")).micro_batches(0, all_rows=True)
    tokens = micro_batch.packed.tokens[:, : int(micro_batch.packed.cu_seqlens[1])]
    model.eval()
    if isinstance(model, PeftModel):
        return model(tokens).logits[0]
    return run_model(model, micro_batch)[0, : tokens.shape[1]]


def test_only_adapters_change_and_the_reference_is_the_base(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint, use_kl_loss=True, kl_loss_coef=0.1, **LORA)
    base = {name: value.clone() for name, value in trainer.export_weights()}
    start = {name: value.clone() for name, value in trainer.export_adapter()}
    assert all(value.any() == (".lora_A." in name) for name, value in start.items())
    reports = [trainer.train(number, _two_steps(number)) for number in range(2)]
    assert reports[0].steps[0]["kl_loss"] == pytest.approx(0, abs=1e-9)
    assert abs(reports[1].steps[1]["kl_loss"]) > 1e-6
    for name, value in trainer.export_weights():
        torch.testing.assert_close(value, base[name], rtol=0, atol=0)
    assert all((value != start[name]).any() for name, value in trainer.export_adapter())
    num_states = sum(1 for state in trainer._ready.optimizer.state.values() for _ in state)
    assert num_states == 3 * len(start)


def test_logits_are_those_of_peft(checkpoint: Path, trained: Any, tmp_path: Path) -> None:
    trained.save_hf(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(_logits(trained._ready.model), _logits(theirs), atol=1e-5, rtol=0)
    with trained._adapters_off(), theirs.disable_adapter():
        torch.testing.assert_close(_logits(trained._ready.model), _logits(theirs), atol=1e-5, rtol=0)


def test_merged_weights_are_those_of_peft(checkpoint: Path, trained: Any, tmp_path: Path) -> None:
    trained.save_hf(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    other = _trainer(checkpoint, lora_merge=True, lora_adapter_path=str(tmp_path / "adapter"), **LORA)
    exported = dict(other.export_weights())
    assert set(exported) == set(merged) - {"lm_head.weight"}
    for name, value in exported.items():
        torch.testing.assert_close(value, merged[name], atol=1e-6, rtol=0)


def test_a_run_resumes_bit_for_bit_from_a_checkpoint_of_its_adapters(checkpoint: Path, tmp_path: Path) -> None:
    whole = _trainer(checkpoint, **LORA)
    reports = [whole.train(number, _two_steps(number)).steps for number in range(2)]
    first = _trainer(checkpoint, save=str(tmp_path / "saved"), **LORA)
    first.train(0, _two_steps(0))
    first.save(0)
    saved = FileSystemReader(tmp_path / "saved" / "iter_0000000").read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in saved)
    resumed = _trainer(checkpoint, load=str(tmp_path / "saved"), **LORA)
    assert resumed.train(1, _two_steps(1)).steps == reports[1]
    for (name, mine), (_, other) in zip(resumed.export_adapter(), whole.export_adapter(), strict=True):
        assert torch.equal(mine, other), name
