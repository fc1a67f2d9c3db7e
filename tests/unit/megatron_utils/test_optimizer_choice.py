"""The optimizer is torch's whichever packages are installed, and fused on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.fsdp_utils.step import build_optimizer
from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.training.arguments import OptimizerArgs
from slime.backends.training.optimizer import fuse_adamw, keep_fused
from slime.utils import accelerator
from slime.utils.accelerator import CUDAAccelerator
from tests.unit.megatron_utils.operators import Operators
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, weights_of

pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture
def gpu() -> Iterator[None]:
    accelerator.set_accelerator(CUDAAccelerator())
    yield
    accelerator.reset_accelerator()


def _trained(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> list[str]:
    """The names of the operators of the last of three steps."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        with Operators() as operators:
            optimizer.step()
    return operators.names


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(9, 5, generator=generator)) for _ in range(4)]


@pytest.mark.usefixtures("gpu")
def test_one_fused_update_of_all_tensors_replaces_a_dozen_operators_per_tensor() -> None:
    plain, fused = _weights(), _weights()
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    many = _trained(torch.optim.AdamW(plain, **settings), plain)
    optimizer = torch.optim.AdamW(fused, **settings)
    fuse_adamw(optimizer)
    assert set(_trained(optimizer, fused)) == {"aten::_foreach_add_.Scalar", "aten::_fused_adamw_"}
    assert len(many) >= 10 * len(plain)
    for mine, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("gpu")
def test_an_optimizer_stays_fused_after_it_has_loaded_an_unfused_one() -> None:
    before, after = _weights(), _weights()
    earlier = torch.optim.AdamW(before, lr=0.01)
    _trained(earlier, before)
    optimizer = torch.optim.AdamW(after, lr=0.01)
    fuse_adamw(optimizer)
    optimizer.load_state_dict(earlier.state_dict())
    assert not optimizer.param_groups[0]["fused"]
    assert "aten::_fused_adamw_" in _trained(optimizer, after)


def test_step_counts_move_to_the_device_of_their_weights() -> None:
    here, there = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([here, there])
    optimizer.state[there]["step"] = torch.tensor(3.0)
    keep_fused(optimizer)
    assert optimizer.state[there]["step"].device.type == "meta"
    assert here not in optimizer.state, "AdamW makes the moments of a weight that has no entry"


def test_adamw_of_both_backends_is_fused_on_a_gpu_only(gpu: None) -> None:
    model: Any = torch.nn.Linear(3, 3)
    assert len(build_optimizer(model, OptimizerArgs())._optimizer_step_pre_hooks) == 1
    assert len(build_optimizer(model, OptimizerArgs(optimizer="sgd"))._optimizer_step_pre_hooks) == 0
    accelerator.reset_accelerator()
    assert len(build_optimizer(model, OptimizerArgs())._optimizer_step_pre_hooks) == 0


class FusedAdam:
    """As TransformerEngine's and Apex': other arguments than torch's."""

    def __init__(self, params: Any, *, adam_w_mode: bool, **others: Any) -> None:
        raise AssertionError("the package's optimizer was made")


def test_an_installed_package_does_not_change_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    make_hf_model("qwen3", tmp_path / "hf")

    def trained(**settings: Any) -> dict[str, torch.Tensor]:
        trainer = MegatronTrainer(make_args(tmp_path / "hf", lr=1e-3, **settings), rank=0, world_size=1, with_ref=False)
        start = trainer.setup()
        for rollout_id in range(start, 2):
            trainer.train(rollout_id, make_batch(seed=rollout_id))
            if rollout_id == 0 and "save" in settings:
                trainer.save(0)
        return weights_of(trainer)

    expected = trained()
    monkeypatch.setattr(optimizer, "Adam", FusedAdam)
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(distrib_optimizer, "Adam", FusedAdam)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
    whole = trained(save=str(tmp_path / "saved"))
    resumed = trained(load=str(tmp_path / "saved"))
    for name, value in expected.items():
        assert torch.equal(whole[name], value), name
        assert torch.equal(resumed[name], value), name
