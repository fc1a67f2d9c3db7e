"""Fake INT4: the trainer computes with the weights that engines have, and trains the unrounded ones."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.megatron_utils.optimizer_rules import fake_quantization, int4
from slime.backends.training.data import TrainBatch
from slime.backends.training.hf_files import TensorReader
from slime.utils.errors import ConfigError
from slime.weight_sync.quantize import quantize_int4
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch
from tests.verification import verify
from tools.convert_hf_to_int4_direct import _IGNORED, convert

_GROUP = 8


pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One checkpoint in bf16, as trained, and in INT4."""
    root = tmp_path_factory.mktemp("int4")
    make_family_checkpoint("qwen3_moe", root / "original", torch.bfloat16)
    options = Namespace(model_dir=str(root / "original"), save_dir=str(root / "int4"), ignore_rules=_IGNORED)
    convert(Namespace(**vars(options), group_size=_GROUP, max_workers=1))
    return root / "original", root / "int4"


def _trainer(path: Path, **overrides: Any) -> MegatronTrainer:
    settings = {"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 1e9, "fp32": False, "bf16": True} | overrides
    trainer = MegatronTrainer(make_args(path, **settings), rank=0, world_size=1, with_ref=False)
    trainer.setup()
    return trainer


def _log_probs(trainer: MegatronTrainer) -> torch.Tensor:
    return torch.cat(trainer._log_probs(TrainBatch(make_batch(), torch.device("cpu"))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_int4_is_what_is_stored_and_read_again(dtype: torch.dtype) -> None:
    from slime.backends.megatron_utils.precision import fake_int4

    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    words, scale = quantize_int4(weight, _GROUP)
    values = torch.stack([(words >> shift & 15) - 8 for shift in range(0, 32, 4)], dim=-1).flatten(1)
    stored = values.float() * scale.float().repeat_interleave(_GROUP, dim=1)
    assert torch.equal(fake_int4(weight, _GROUP), stored.to(dtype))


def test_experts_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.megatron_utils import precision

    weight = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(precision, "_ROUNDED_TOGETHER", 3 * 32)
    assert torch.equal(precision._fake_int4_experts(weight, _GROUP), precision.fake_int4(weight, _GROUP))


def test_fake_int4_of_columns_that_are_no_groups_is_refused() -> None:
    from slime.backends.megatron_utils.precision import fake_int4

    with pytest.raises(ValueError, match="8 does not divide 30"):
        fake_int4(torch.zeros(2, 30), _GROUP)


def test_gradients_pass_through_the_rounding_as_if_it_were_not_there() -> None:
    from slime.backends.megatron_utils.precision import _multiply, fake_int4

    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(5, 1, 16, generator=generator).requires_grad_()
    weight = torch.randn(6, 16, generator=generator).requires_grad_()
    target = torch.randn(5, 1, 6, generator=generator)
    (_multiply(_GROUP, input=tokens, weight=weight) * target).sum().backward()
    found = tokens.grad, weight.grad
    tokens.grad = weight.grad = None
    straight = weight + (fake_int4(weight, _GROUP) - weight).detach()
    ((tokens @ straight.t()) * target).sum().backward()
    for one, other in zip(found, (tokens.grad, weight.grad), strict=True):
        verify("gradients of fake INT4", "w + (q(w) - w).detach() in autograd", one, other, tolerance=1e-5)


def test_the_trainer_is_the_model_that_the_engines_load_and_keeps_what_nobody_rounded(
    checkpoints: tuple[Path, Path],
) -> None:
    original, rounded = checkpoints
    fake = _trainer(rounded, ref_load=str(original), int4_group_size=_GROUP)
    plain = _trainer(rounded)  # reads the rounded weights
    ours, theirs = _log_probs(fake), _log_probs(plain)
    assert (ours - _log_probs(_trainer(original))).abs().max() > 1e-3
    verify("log-probs with fake INT4, bf16", "a trainer of the rounded weights", ours, theirs, tolerance=0)

    reader, before = TensorReader(str(original), "--hf-checkpoint"), dict(fake.export_weights())
    assert all(torch.equal(before[name], reader.get(name)) for name in reader.names)
    steps = [trainer.train(0, make_batch(seed=4)).steps[0] for trainer in (fake, plain)]
    assert steps[0]["grad_norm"] == steps[1]["grad_norm"]


def _args(path: Path, **overrides: Any) -> Namespace:
    return Namespace(
        **({"hf_checkpoint": str(path), "train_backend": "megatron", "fp8": None, "fp32": False} | overrides)
    )


def test_the_environment_switches_fake_int4_on(monkeypatch: pytest.MonkeyPatch, checkpoints: tuple[Path, Path]) -> None:
    args = _args(checkpoints[1])
    fake_quantization(args)
    assert args.int4_group_size is None
    assert not list(int4(args))
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    fake_quantization(args)
    assert args.int4_group_size == 128
    assert "has groups of 8" in next(int4(args))
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "8")
    fake_quantization(args)
    assert not list(int4(args))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"train_backend": "fsdp"}, "--train-backend fsdp"),
        ({"fp8": "hybrid"}, "exclude each other"),
        ({"fp32": True}, "--fp32"),
    ],
)
def test_fake_int4_is_refused_where_nothing_would_round(
    overrides: dict[str, Any], problem: str, checkpoints: tuple[Path, Path]
) -> None:
    assert problem in next(int4(_args(checkpoints[1], int4_group_size=_GROUP, **overrides)))


def test_fake_int4_is_refused_for_engines_that_do_not_round(checkpoints: tuple[Path, Path]) -> None:
    assert "pack-quantized" in next(int4(_args(checkpoints[0], int4_group_size=_GROUP)))


@pytest.mark.parametrize(("name", "value"), [("FAKE_QAT_FLAG", "yes"), ("GROUP_SIZE", "0"), ("GROUP_SIZE", "many")])
def test_a_variable_of_fake_int4_with_another_value_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"OPEN_TRAINING_INT4_{name}", value)
    with pytest.raises(ConfigError, match=f"OPEN_TRAINING_INT4_{name}={value}"):
        fake_quantization(Namespace())
