"""Optimizer states on the host change no number, in training and across a checkpoint. One process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model

OFFLOADED = {"optimizer_cpu_offload": True}


pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "hf"
    make_hf_model("qwen3", path)
    return path


def _train(hf: Path, rollouts: range, **overrides: Any) -> tuple[MegatronTrainer, dict[str, torch.Tensor]]:
    """Train, and save after the last rollout if a directory is set."""
    settings = {"lr": 1e-3, "weight_decay": 0.1, "lr_decay_style": "cosine", "lr_warmup_iters": 1} | overrides
    trainer = MegatronTrainer(make_args(hf, **settings), rank=0, world_size=1, with_ref=False)
    assert trainer.setup() == rollouts.start
    for rollout_id in rollouts:
        trainer.train(rollout_id, make_batch(seed=rollout_id))
    if overrides.get("save"):
        trainer.save(rollouts[-1])
    return trainer, {name: value.clone() for name, value in trainer.export_weights()}


@pytest.mark.parametrize("fraction", [1.0, 0.3])
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        ({"fp32": True}, 1e-6),
        ({"fp32": False}, 0.0),
        ({"fp32": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}, 0.0),
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_states_on_the_host_train_the_same(
    hf: Path, precision: dict[str, Any], tolerance: float, fraction: float
) -> None:
    _, plain = _train(hf, range(3), **precision)
    _, ours = _train(hf, range(3), **precision, **OFFLOADED, optimizer_offload_fraction=fraction)
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(("first", "second"), [(OFFLOADED, {}), ({}, OFFLOADED), (OFFLOADED, OFFLOADED)])
def test_a_checkpoint_does_not_tell_where_the_states_were(
    hf: Path, first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    _, whole = _train(hf, range(3), fp32=False)
    _train(hf, range(2), fp32=False, save=str(tmp_path), **first)
    _, resumed = _train(hf, range(2, 3), fp32=False, load=str(tmp_path), **second)
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def test_forgotten_moments_leave_the_main_weights_alone(hf: Path) -> None:
    from slime.backends.megatron_utils.optimizer.build import reset_moments

    trainer, _ = _train(hf, range(1), fp32=False, **OFFLOADED)
    (part,) = trainer._ready.optimizer.chained_optimizers
    before = [state["master_param"].clone() for state in part.optimizer.state.values()]
    reset_moments(trainer._ready.optimizer)
    for state, main in zip(part.optimizer.state.values(), before, strict=True):
        assert torch.equal(state["master_param"], main)
        assert not state["exp_avg"].any()
        assert not state["exp_avg_sq"].any()
        assert state["step"] == 0


def test_the_share_on_the_host_is_the_one_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.megatron_utils.optimizer import host_adam

    monkeypatch.setattr(host_adam, "_HOST", torch.device("meta"))  # another device than that of the weights
    shards = [torch.zeros(10) for _ in range(4)]
    for fraction, num_on_device in ((0.0, 12), (0.5, 6), (0.6, 3), (1.0, 0)):
        optimizer = host_adam.HostAdam([{"params": shards}], fraction=fraction)
        assert len(list(optimizer.device_tensors())) == num_on_device
