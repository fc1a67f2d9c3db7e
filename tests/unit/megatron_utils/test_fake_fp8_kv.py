"""Fake FP8 of latent key-values: the trainer attends to the values of an engine's FP8 cache."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.megatron_utils.optimizer_rules import fake_quantization, kv_fp8
from slime.backends.training.data import TrainBatch
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch
from tests.verification import verify

_BLOCK = 8


pytestmark = pytest.mark.usefixtures("trainer_rank")


def _log_probs(path: Path, batch: dict[str, Any], **overrides: Any) -> list[torch.Tensor]:
    trainer = MegatronTrainer(make_args(path, **overrides), rank=0, world_size=1, with_ref=False)
    trainer.setup()
    return list(trainer._log_probs(TrainBatch(batch, torch.device("cpu"))))


def test_fake_fp8_is_within_half_a_step_of_three_bits_and_passes_gradients_on() -> None:
    from slime.backends.megatron_utils.precision import fake_fp8

    latents = torch.randn(5, 1, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rounded = fake_fp8(latents, _BLOCK)
    blocks, largest = rounded.view(5, 3, _BLOCK), latents.view(5, 3, _BLOCK).abs().amax(-1)
    assert torch.allclose(blocks.abs().amax(-1), largest)  # the largest is kept
    error = (rounded - latents).abs()
    assert (error > 0).any()
    assert (error <= latents.abs() / 16 + largest.repeat_interleave(_BLOCK, 1).view_as(error) * 2.0**-18).all()
    weights = torch.randn(5, 1, 24)
    (rounded * weights).sum().backward()
    assert torch.equal(latents.grad, weights)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_log_probs_are_those_of_transformers_with_rounded_latents(kind: str, tmp_path: Path) -> None:
    from slime.backends.megatron_utils.precision import fake_fp8

    hf = make_family_checkpoint(kind, tmp_path)
    batch = make_batch(9, seed=3)
    plain, ours = _log_probs(tmp_path, batch), _log_probs(tmp_path, batch, kv_fp8_block_size=_BLOCK)
    for layer in hf.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda module, inputs, output: fake_fp8(output, _BLOCK))
    assert max((one - two).abs().max() for one, two in zip(plain, ours, strict=True)) > 1e-4
    for tokens, length, mine in zip(batch["tokens"], batch["response_lengths"], ours, strict=True):
        with torch.no_grad():
            table = hf(tokens[None]).logits[0].log_softmax(-1)
        where = torch.arange(len(tokens) - length, len(tokens))
        verify(
            f"log-probs of {kind} with fake FP8 latents",
            "transformers, rounded by a hook",
            mine,
            table[where - 1, tokens[where]],
            tolerance=1e-5,
        )


def test_the_environment_switches_fake_fp8_on_for_sparse_attention_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_family_checkpoint("deepseek_v32", tmp_path / "sparse")
    make_family_checkpoint("deepseek_v3", tmp_path / "dense")
    args = Namespace(hf_checkpoint=str(tmp_path / "sparse"), train_backend="megatron")
    fake_quantization(args)
    assert args.kv_fp8_block_size is None
    monkeypatch.setenv("DSA_KV_FP8_QAT", "1")
    fake_quantization(args)
    assert args.kv_fp8_block_size == 128
    assert not list(kv_fp8(args))
    args.hf_checkpoint = str(tmp_path / "dense")
    assert "does not have" in next(kv_fp8(args))
    args.train_backend = "fsdp"
    assert "--train-backend fsdp" in next(kv_fp8(args))
