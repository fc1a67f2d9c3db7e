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
from slime.config.plan.engine import weight_sync
from slime.config.plan.memory import stage_memory
from slime.config.plan.placement import read_layout
from slime.config.plan.shape import read_shape
from slime.utils.errors import ConfigError, SlimeError
from tests.unit.fsdp_utils.test_fsdp_trainer import _trained, _trainer, _two_steps
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
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


_IN_BF16 = {"fp32": False, "bf16": True, "lora_dropout": 0.1, "kl_coef": 0.1, "ref_update_interval": 1}


@pytest.mark.parametrize("precision", [{}, _IN_BF16], ids=["fp32", "bf16, a reference that follows"])
def test_a_run_resumes_bit_for_bit_from_a_checkpoint_of_its_adapters(
    checkpoint: Path, precision: dict[str, Any], tmp_path: Path
) -> None:
    settings = LORA | precision
    whole = _trainer(checkpoint, save=str(tmp_path / "saved"), **settings)
    whole.train(0, _two_steps(0))
    whole.save(0)
    expected = whole.train(1, _two_steps(1))
    saved = FileSystemReader(tmp_path / "saved" / "iter_0000000").read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in saved)
    resumed = _trainer(checkpoint, load=str(tmp_path / "saved"), **settings)
    continued = resumed.train(1, _two_steps(1))
    assert (continued.steps, continued.rollout) == (expected.steps, expected.rollout)
    for (name, mine), (_, other) in zip(resumed.export_adapter(), whole.export_adapter(), strict=True):
        assert torch.equal(mine, other), name


def test_names_of_mlps_in_a_model_with_experts_are_not_those_of_the_experts(tmp_path: Path) -> None:
    make_family_checkpoint("moonlight", tmp_path / "model")
    names = ["o_proj", "mlp.up_proj", "shared_experts.down_proj"]
    settings = {**LORA, "lora_target_modules": names, "lora_dropout": 0.0}
    first = _trainer(tmp_path / "model", **settings)
    layers = ["0.mlp.up_proj", "1.mlp.shared_experts.down_proj", "2.mlp.shared_experts.down_proj"]
    layers += [f"{number}.self_attn.o_proj" for number in range(3)]
    expected = {f"model.layers.{layer}.lora_{matrix}.weight" for layer in layers for matrix in "AB"}
    assert {name for name, _ in first.export_adapter()} == expected
    first.train(0, _two_steps())
    first.save_hf(str(tmp_path / "adapter"))
    start = {**settings, "lora_adapter_path": str(tmp_path / "adapter"), "lora_merge": True}
    (ours, weights), (theirs, expected_weights) = (
        _trained(tmp_path / "model", backend, num_rollouts=1, **start) for backend in ("fsdp", "megatron")
    )
    assert ours[0].rollout == pytest.approx(theirs[0].rollout, rel=1e-4, abs=2e-6)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, atol=2e-5, rtol=0)


def test_a_model_that_cannot_be_sharded_is_named_before_its_layers_get_adapters(tmp_path: Path) -> None:
    make_family_checkpoint("qwen3_5", tmp_path / "model")
    with pytest.raises(ConfigError, match="is not supported yet: its layers carry a state"):
        _trainer(tmp_path / "model", **LORA)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_copies_of_a_policy_are_copies_of_its_adapters(checkpoint: Path, backend: str) -> None:
    settings = {**LORA, "kl_coef": 0.1, "ref_update_interval": 1}
    trainer = _trainer(checkpoint, backend, **settings)
    trainer.keep_version("0")
    first = trainer.train(0, _two_steps()).rollout
    assert first["ref_log_probs"] == first["log_probs"]
    second = trainer.train(1, _two_steps()).rollout
    assert second["ref_log_probs"] == second["log_probs"] != first["log_probs"], "the reference is the live adapters"
    kept = trainer.train(2, _two_steps() | {"generated_by": "0"}).rollout
    assert kept["log_probs"] == first["log_probs"], "the kept version generated this rollout"
    assert kept["ref_log_probs"] not in (first["log_probs"], second["log_probs"])


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_offloading_changes_no_bit_of_base_and_adapters(checkpoint: Path, backend: str, tmp_path: Path) -> None:
    reports, results = [], []
    for is_offloaded in (False, True):
        trainer = _trainer(checkpoint, backend, **LORA)
        for number in range(2):
            if is_offloaded:
                trainer.offload()
                with pytest.raises(SlimeError, match="weights"):
                    trainer.save_hf(str(tmp_path / "too_early"))
                trainer.onload()
            reports.append(trainer.train(number, _two_steps(number)).steps)
        results.append({name: value.clone() for name, value in [*trainer.export_weights(), *trainer.export_adapter()]})
    assert reports[:2] == reports[2:]
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_plan_has_the_numbers_of_the_trainer(checkpoint: Path, backend: str) -> None:
    trainer = _trainer(checkpoint, backend, **LORA, fp32=False, bf16=True, world_size=1)
    parameters = list(trainer._ready.model.parameters()) if backend == "fsdp" else []
    parameters = parameters or list(trainer._ready.chunks[0].parameters())
    shape, layout = read_shape(trainer._args), read_layout(trainer._args)
    (stage,) = stage_memory(trainer._args, shape, layout)
    assert stage.parameters == sum(parameter.numel() for parameter in parameters)
    assert stage.trained == sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    sync = weight_sync(trainer._args, shape, layout, num_rollouts=1)
    assert sync.bytes == sum(value.nbytes for _, value in trainer.export_adapter())
    assert sync.base_bytes == sum(value.nbytes for _, value in trainer.export_weights())
