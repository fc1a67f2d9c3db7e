"""A step that is skipped moves nothing, also not the biases of routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model

pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.mark.parametrize("is_nan", [False, True])
def test_a_skipped_step_leaves_the_biases_of_routers(is_nan: bool, tmp_path: Path) -> None:
    make_family_checkpoint("deepseek_v3", tmp_path / "hf")
    settings = {"moe_router_bias_update_rate": 0.1, "check_for_nan_in_loss_and_grad": False}
    args = make_args(tmp_path / "hf", output_dir=str(tmp_path), **settings)
    trainer = MegatronTrainer(args, rank=0, world_size=1, with_ref=False)
    trainer.setup()
    before = {name: value.clone() for name, value in trainer.export_weights()}
    batch = make_batch()
    if is_nan:
        batch["rewards"][3] = float("nan")
    else:
        for mask in batch["loss_masks"]:
            mask.fill_(0)
        batch["rollout_mask_sums"] = torch.zeros(8)
    assert trainer.train(0, batch).steps[0]["skipped_steps"] == 1
    moved = [name for name, value in trainer.export_weights() if not torch.equal(value, before[name])]
    assert moved == []
    trainer.train(1, make_batch())
    assert any("bias" in name for name, value in trainer.export_weights() if not torch.equal(value, before[name]))


@pytest.mark.parametrize("flags", [{}, {"use_distributed_optimizer": False}, {"optimizer": "sgd"}])
def test_settings_of_the_optimizer_are_those_of_the_command_line_after_a_resume(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    from slime.backends.megatron_utils.actor import MegatronTrainer

    make_hf_model("qwen3", tmp_path / "hf")

    def started(**more: Any) -> MegatronTrainer:
        trainer = MegatronTrainer(make_args(tmp_path / "hf", **flags, **more), rank=0, world_size=1, with_ref=False)
        trainer.setup()
        return trainer

    first = started(save=str(tmp_path / "save"))
    first.train(0, make_batch())
    first.save(0)
    resumed = started(load=str(tmp_path / "save"), adam_beta2=0.5, adam_eps=1e-3, sgd_momentum=0.1)
    for group in resumed._ready.optimizer.param_groups:
        wanted = {"momentum": 0.1} if flags.get("optimizer") else {"betas": (0.9, 0.5), "eps": 1e-3}
        assert {name: group[name] for name in wanted} == wanted
