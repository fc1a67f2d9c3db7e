"""Adapters on Megatron against peft on transformers: the same log-probs, gradients, files and merged weights."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import load_tensors_metadata
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights
from slime.backends.megatron_utils.model.lora import adapters_of
from slime.backends.training.adapter_files import save_adapter
from slime.models.lora import CONFIG_FILE, FILE_PREFIX, WEIGHTS_FILE, LoraConfig, tensor_name
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint, packed_logits, saved_tensors
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_args, make_batch
from tests.verification import verify
from tools.merge_lora import merge

pytestmark = pytest.mark.usefixtures("trainer_rank")

LORA = {"lora_rank": 4, "lora_alpha": 6.0}
SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0, "lr": 1.0}
"""With it a step subtracts the gradients."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, Any]] = {}

    def get(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            made[kind] = path, make_family_checkpoint(kind, path)
        return made[kind]

    return get


def _trainer(path: Path, **overrides: Any) -> MegatronTrainer:
    has_kl = "kl_coef" in overrides
    trainer = MegatronTrainer(make_args(path, **(LORA | overrides)), rank=0, world_size=1, with_ref=has_kl)
    trainer.setup()
    return trainer


def _randomize(trainer: MegatronTrainer) -> None:
    """Outputs of adapters that are not zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for adapter in adapters_of(trainer._ready.model):
            noise = 0.2 * torch.randn(adapter.lora_B.shape, generator=generator)
            used = 1 if adapter.uses is None else adapter.uses.sum(1, keepdim=True).repeat(adapter.num_experts, 1)
            adapter.lora_B.copy_(noise * used)
    trainer._begin_with_filled()


def _sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in (9, 1, 40)]


def _peft(model: Any, directory: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(copy.deepcopy(model), str(directory), is_trainable=True).eval()


def _gradients(model: Any, names: Any) -> dict[str, torch.Tensor]:
    parameters = {name.replace(".default.", "."): one.grad for name, one in model.named_parameters() if "lora_" in name}
    return {name: parameters[FILE_PREFIX + name] for name in names}


def _sft_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The mean over samples of the mean negative log-likelihood of the trained tokens."""
    losses = []
    for tokens, length, mask in zip(batch["tokens"], batch["response_lengths"], batch["loss_masks"], strict=True):
        table = model(tokens[None]).logits[0, -length - 1 : -1].log_softmax(-1)
        chosen = table.gather(1, tokens[-length:, None])[:, 0]
        losses.append(-(chosen * mask).sum() / mask.sum().clamp(min=1))
    return torch.stack(losses).mean()


CASES = {
    "dense": ("qwen3", {}),
    "llama, some of a fused layer": ("llama", {"lora_target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}),
    "one tensor for gate and up": ("glm4", {}),
    "attention beside experts": ("qwen3_moe", {}),
    "latent attention": ("moonlight", {}),
    "latent attention, compressed queries": ("deepseek_v3", {}),
    "gated delta nets": ("qwen3_next", {}),
    "rsLoRA": ("qwen2", {"lora_use_rslora": True, "lora_alpha": 2.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_log_probs_and_gradients_equal_peft(case: str, checkpoint: Any, tmp_path: Path) -> None:
    kind, settings = CASES[case]
    path, reference = checkpoint(kind)
    trainer = _trainer(path, loss_type="sft_loss", **SGD, **settings)
    _randomize(trainer)
    trainer.save_hf(str(tmp_path / "adapter"))
    before = {name: value.clone() for name, value in trainer.export_adapter()}
    saved = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    assert saved.keys() == {FILE_PREFIX + name for name in before}
    model = _peft(reference, tmp_path / "adapter")
    sequences = _sequences()
    with torch.no_grad():
        expected = torch.cat([model(sequence[None]).logits[0].log_softmax(-1) for sequence in sequences])
        plain = torch.cat([reference(sequence[None]).logits[0].log_softmax(-1) for sequence in sequences])
    ours = packed_logits(trainer._ready.chunks[0].eval(), sequences).log_softmax(-1)
    verify(f"log-probs with adapters of {kind}", "peft", ours, expected, tolerance=1e-5)
    assert (expected - plain).abs().max() > 0.1, "the adapters change the model"
    batch = make_batch(with_rollout=False)
    trainer.train(0, batch)
    _sft_loss(model, batch).backward()
    gradients = _gradients(model, before)
    for name, after in trainer.export_adapter():
        verify(f"gradients of adapters of {kind}", "peft", before[name] - after, gradients[name], tolerance=1e-5)
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients.values())


_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _with_adapters(model: Any, matrices: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of a model of transformers plus ``scale B A``. It stacks the experts of a layer."""

    def summed(name: str, weight: torch.Tensor) -> torch.Tensor:
        inner, outer = (matrices.get(tensor_name(name, matrix)) for matrix in "AB")
        return weight if inner is None else weight + LORA["lora_alpha"] / LORA["lora_rank"] * outer @ inner

    found = {}
    for name, value in model.named_parameters():
        experts, _, leaf = name.rpartition(".")
        if leaf in _STACKS:
            parts = _STACKS[leaf]
            names = [[f"{experts}.{expert}.{part}.weight" for part in parts] for expert in range(len(value))]
            pieces = [zip(row, weight.chunk(len(parts)), strict=True) for row, weight in zip(names, value, strict=True)]
            found[name] = torch.stack([torch.cat([summed(*piece) for piece in row]) for row in pieces])
        else:
            found[name] = summed(name, value)
    return found


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_gradients_of_all_layers_of_a_model_with_experts_equal_those_of_whole_weights(
    kind: str, checkpoint: Any
) -> None:
    path, reference = checkpoint(kind)
    trainer = _trainer(path, loss_type="sft_loss", lora_experts=True, **SGD)
    _randomize(trainer)
    before = _adapters(trainer)
    for part in (".mlp.experts.0.", ".mlp.gate_proj.", ".self_attn."):
        assert any(part in name for name in before)
    leaves = {name: value.clone().requires_grad_() for name, value in before.items()}
    weights = _with_adapters(reference, leaves)
    _sft_loss(lambda tokens: functional_call(reference, weights, (tokens,)), make_batch(with_rollout=False)).backward()
    trainer.train(0, make_batch(with_rollout=False))
    for name, after in trainer.export_adapter():
        expected = leaves[name].grad
        verify(f"gradients of adapters of {kind}", "W + scale B A", before[name] - after, expected, tolerance=1e-5)
    is_used = [bool(leaf.grad.abs().max() > 1e-4) for name, leaf in leaves.items() if ".experts." in name]
    assert sum(is_used) > len(is_used) / 2


ADAM = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "kl_coef": 0.1}


def _adapters(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.export_adapter()}


_IN_BF16 = {"fp32": False, "bf16": True, "async_save": True, "num_rollout": 10, "ref_update_interval": 1}


_MUON = {"optimizer": "muon", "use_distributed_optimizer": False}  # nothing is left for its Adam: adapters are matrices


@pytest.mark.parametrize(
    "precision",
    [{}, _IN_BF16, _MUON, _MUON | {"optimizer": "dist_muon", "fp32": False, "bf16": True}],
    ids=["fp32", "bf16, saved while the next rollout is trained", "muon", "dist_muon"],
)
@pytest.mark.parametrize("kind", ["qwen3", "moonlight", "qwen3_moe"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    kind: str, precision: dict[str, Any], checkpoint: Any, tmp_path: Path
) -> None:
    path, _ = checkpoint(kind)
    settings = {**ADAM, **precision, "save": str(tmp_path), "lora_dropout": 0.1, "lora_experts": True}
    straight = _trainer(path, **settings)
    started = _adapters(straight)
    straight.train(0, make_batch(seed=0))
    straight.save(0)
    expected = straight.train(1, make_batch(seed=1))
    straight.finish_saves()
    resumed = _trainer(path, **settings, load=str(tmp_path))
    continued = resumed.train(1, make_batch(seed=1))
    assert (continued.steps, continued.rollout) == (expected.steps, expected.rollout)
    after = _adapters(straight)
    assert all(torch.equal(value, after[name]) for name, value in _adapters(resumed).items())
    assert all(not torch.equal(value, started[name]) for name, value in after.items() if ".experts." not in name)
    saved = load_tensors_metadata(str(tmp_path / "iter_0000000"))
    assert saved
    assert all(".adapter.lora_" in name for name in saved), "adapters, main weights and moments, but not the base"


def test_another_base_or_other_settings_cannot_be_resumed(checkpoint: Any, tmp_path: Path) -> None:
    path, _ = checkpoint("qwen3")
    trainer = _trainer(path, save=str(tmp_path))
    trainer.save(0)
    other = shutil.copytree(path, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    for base, settings, message in (
        (other, {}, "adapters of another base"),
        (path, {"lora_rank": 2}, "saved with rank 4 of its adapters, but this run has 2"),
        (path, {"lora_rank": 0}, "holds adapters of rank 4 and not their base: give --lora-rank 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            _trainer(base, load=str(tmp_path), **settings)


def test_the_reference_is_the_base_and_only_adapters_are_trained(checkpoint: Any) -> None:
    path, reference = checkpoint("qwen3")
    trainer = _trainer(path, **ADAM)
    base = {name: value.clone() for name, value in trainer._ready.chunks[0].named_parameters() if "adapter" not in name}
    for rollout in range(2):
        report = trainer.train(rollout, make_batch(seed=rollout)).rollout
        assert (report["ref_log_probs"] == report["log_probs"]) == (rollout == 0)
    batch = trainer._train_batch(make_batch(seed=5))
    with trainer._reference.swapped_in():
        ours = trainer._log_probs(batch)
    columns = batch.columns
    for log_probs, tokens, length in zip(ours, columns["tokens"], columns["response_lengths"], strict=True):
        with torch.no_grad():
            table = reference(tokens[None]).logits[0, -length - 1 : -1].log_softmax(-1)
        theirs = table.gather(1, tokens[-length:, None])[:, 0]
        verify("log-probs with adapters off", "transformers", log_probs, theirs, tolerance=1e-5)
    parameters = dict(trainer._ready.chunks[0].named_parameters())
    assert all(torch.equal(value, parameters[name]) for name, value in base.items())
    assert all(parameter.requires_grad == ("adapter" in name) for name, parameter in parameters.items())
    weights = sum(p.numel() for name, p in parameters.items() if "adapter" in name)
    assert sum(buffer.grad_data.numel() for buffer in trainer._ready.chunks[0].buffers) < weights + 1000
    copied = trainer._copied_weights()
    assert sum(copy.numel() for copy in copied._copy) == weights, "an old policy is a copy of the adapters"


@pytest.mark.parametrize("kind", ["qwen3", "glm4", "moonlight", "qwen3_next"])
def test_merged_weights_are_the_base_plus_the_adapters(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    path, _ = checkpoint(kind)
    trainer = _trainer(path, lora_merge=True)
    _randomize(trainer)
    adapters, base = _adapters(trainer), saved_tensors(path)
    merged = dict(trainer.export_weights())
    assert merged.keys() >= {name.replace(".lora_A", "") for name in adapters if ".lora_A" in name}
    for name, value in merged.items():
        expected = base[name]
        if (inner := adapters.get(tensor_name(name, "A"))) is not None:
            expected = expected + LORA["lora_alpha"] / LORA["lora_rank"] * adapters[tensor_name(name, "B")] @ inner
        verify("merged weights", "base + scale B A", value, expected, tolerance=1e-6)
    trainer.save_hf(str(tmp_path / "merged"))
    assert (
        saved_tensors(tmp_path / "merged")["model.norm.weight" if kind != "qwen3_5" else "lm_head.weight"] is not None
    )


def test_the_tool_merges_as_the_trainer_does(checkpoint: Any, tmp_path: Path) -> None:
    path, _ = checkpoint("qwen3")
    trainer = _trainer(path)
    _randomize(trainer)
    trainer.save_hf(str(tmp_path / "adapter"))
    merge(str(path), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    expected = dict(export_weights(trainer._ready.model, trainer._shape, content="merged"))
    for name, value in saved_tensors(tmp_path / "merged").items():
        verify("weights merged by the tool", "the trainer's merged weights", value, expected[name], tolerance=1e-6)
    other = tmp_path / "other"
    shutil.copytree(path, other)
    save_file({name: 2 * value for name, value in saved_tensors(path).items()}, other / "model.safetensors")
    with pytest.raises(ConfigError, match="adapter of another base"):
        merge(str(other), str(tmp_path / "adapter"), str(tmp_path / "wrong"))
    config = tmp_path / "adapter" / CONFIG_FILE
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alpha_pattern": {"q_proj": 32}}))
    with pytest.raises(ConfigError, match=r"alpha_pattern .* is not computed"):
        merge(str(path), str(tmp_path / "adapter"), str(tmp_path / "wrong"))


def test_the_tool_merges_experts_that_a_checkpoint_stacks(checkpoint: Any, tmp_path: Path) -> None:
    path, _ = checkpoint("qwen3_moe_unnormalised")
    trainer = _trainer(path, lora_experts=True)
    _randomize(trainer)
    base, adapters = saved_tensors(path), _adapters(trainer)
    stacked = {name: value for name, value in base.items() if ".experts." not in name}
    expected = {}
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts"
        for leaf, parts in _STACKS.items():
            names = [[f"{stem}.{expert}.{part}.weight" for part in parts] for expert in range(8)]
            stacked[f"{stem}.{leaf}"] = torch.stack([torch.cat([base[name] for name in row]) for row in names])
            merged = [[base[name] + 1.5 * _product(adapters, name) for name in row] for row in names]
            expected[f"{stem}.{leaf}"] = torch.stack([torch.cat(row) for row in merged])
    (tmp_path / "base").mkdir()
    shutil.copy(path / "config.json", tmp_path / "base")
    save_file(stacked, tmp_path / "base" / "model.safetensors")
    save_adapter(
        adapters.items(),
        LoraConfig(4, 6.0, experts=True),
        trainer._shape,
        str(tmp_path / "base"),
        str(tmp_path / "adapter"),
    )
    merge(str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    found = saved_tensors(tmp_path / "merged")
    assert found.keys() == stacked.keys()
    for name, value in expected.items():
        verify("stacked experts merged by the tool", "base + scale B A", found[name], value, tolerance=1e-6)


def _product(adapters: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return adapters[tensor_name(name, "B")] @ adapters[tensor_name(name, "A")]


def test_training_starts_from_an_adapter_of_peft(checkpoint: Any, tmp_path: Path) -> None:
    path, reference = checkpoint("llama")
    first = _trainer(path)
    _randomize(first)
    first.save_hf(str(tmp_path / "ours"))
    model = _peft(reference, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    second = _trainer(path, lora_adapter_path=str(tmp_path / "theirs"))
    expected = _adapters(first)
    assert all(torch.equal(value, expected[name]) for name, value in _adapters(second).items())
    logits = [packed_logits(each._ready.chunks[0].eval(), _sequences()) for each in (first, second)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj", "moe_act"]},
    ],
    ids=["full", "selective"],
)
def test_recomputing_activations_changes_nothing(recompute: dict[str, Any], checkpoint: Any) -> None:
    path, _ = checkpoint("deepseek_v3")
    settings = {**ADAM, "lora_experts": True, "lora_dropout": 0.1}
    plain, recomputed = _trainer(path, **settings), _trainer(path, **settings, **recompute)
    for trainer in (plain, recomputed):
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        steps = trainer.train(0, make_batch()).steps
        assert steps[0]["grad_norm"] > 0
    expected = _adapters(plain)
    for name, value in _adapters(recomputed).items():
        verify("adapters after a step with recomputed layers", "stored activations", value, expected[name])


def test_log_probs_with_adapters_of_experts_equal_peft(checkpoint: Any, tmp_path: Path) -> None:
    path, reference = checkpoint("qwen3_moe_unnormalised")
    trainer = _trainer(path, lora_experts=True)
    _randomize(trainer)
    trainer.save_hf(str(tmp_path / "adapter"))
    model = _peft(reference, tmp_path / "adapter")
    with torch.no_grad():
        expected = torch.cat([model(sequence[None]).logits[0].log_softmax(-1) for sequence in _sequences()])
    ours = packed_logits(trainer._ready.chunks[0].eval(), _sequences()).log_softmax(-1)
    assert (ours - expected).abs().max() < 1e-5
