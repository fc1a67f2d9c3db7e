"""Saving, resuming and refusing checkpoints, with real files and one rank."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, use_single_rank_env


@pytest.fixture(scope="module", autouse=True)
def _single_rank() -> Iterator[None]:
    use_single_rank_env()
    yield
    if dist.is_initialized():
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_hf_model("qwen3", path)
    return path


def _trainer(path: Path, *, with_ref: bool = False, **overrides: Any) -> tuple[MegatronTrainer, int]:
    settings = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "weight_decay": 0.1} | overrides
    trainer = MegatronTrainer(make_args(path, **settings), rank=0, world_size=1, with_ref=with_ref)
    return trainer, trainer.setup()


def _weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.export_weights()}


@pytest.mark.parametrize(
    "precision",
    [
        {},
        {"fp32": False, "bf16": True},
        {"use_distributed_optimizer": False},
        {"optimizer": "sgd"},
        {"hidden_dropout": 0.1},  # continues with the saved random number generator
    ],
    ids=["fp32", "bf16", "plain-adam", "sgd", "dropout"],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    precision: dict[str, Any], hf_path: Path, tmp_path: Path
) -> None:
    straight, _ = _trainer(hf_path, save=str(tmp_path / "ck"), **precision)
    for i in range(2):
        straight.train(i, make_batch(seed=i))
    straight.save(1)
    expected = [straight.train(i, make_batch(seed=i)).steps for i in (2, 3)]

    resumed, start = _trainer(hf_path, load=str(tmp_path / "ck"), save=str(tmp_path / "ck"), **precision)
    assert start == 2
    assert [resumed.train(i, make_batch(seed=i)).steps for i in (2, 3)] == expected
    want, got = _weights(straight), _weights(resumed)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_checkpoint_has_megatrons_layout_and_a_tracker(hf_path: Path, tmp_path: Path) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path))
    trainer.save(3)
    trainer.save(12)
    trainer.save(12)  # again, as a resumed run may
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "iter_0000003",
        "iter_0000012",
        "latest_checkpointed_iteration.txt",
    ]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert {".metadata", "common.pt", "metadata.json"} <= {e.name for e in (tmp_path / "iter_0000012").iterdir()}


def test_finetune_no_load_optim_and_ckpt_step_choose_what_is_taken(hf_path: Path, tmp_path: Path) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path))
    trainer.train(0, make_batch())
    trainer.save(0)
    after_one = _weights(trainer)
    trainer.train(1, make_batch())
    trainer.save(1)

    at_step, start = _trainer(hf_path, load=str(tmp_path), ckpt_step=0)
    assert start == 1
    assert all(torch.equal(value, after_one[name]) for name, value in _weights(at_step).items())

    finetuned, start = _trainer(hf_path, load=str(tmp_path), finetune=True)
    assert start == 0
    assert finetuned.train(0, make_batch()).steps[0]["lr-pg_0"] == pytest.approx(0.0)  # the warm-up starts again

    weights_only, start = _trainer(hf_path, load=str(tmp_path), no_load_optim=True, no_load_rng=True)
    assert start == 2
    assert all(torch.equal(value, _weights(trainer)[name]) for name, value in _weights(weights_only).items())


def test_weights_saved_without_optimizer_can_be_loaded_without(hf_path: Path, tmp_path: Path) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path), no_save_optim=True, no_save_rng=True)
    trainer.train(0, make_batch())
    trainer.save(0)
    loaded, start = _trainer(hf_path, load=str(tmp_path), no_load_optim=True, no_load_rng=True)
    assert start == 1
    assert all(torch.equal(value, _weights(trainer)[name]) for name, value in _weights(loaded).items())
    with pytest.raises(ConfigError, match=f"--load {tmp_path}"):
        _trainer(hf_path, load=str(tmp_path))


def test_a_torch_dist_reference_is_used_for_kl_and_as_start_while_load_is_empty(hf_path: Path, tmp_path: Path) -> None:
    base, _ = _trainer(hf_path, save=str(tmp_path / "base"))
    base.train(0, make_batch())
    base.train(1, make_batch())
    base.save(1)
    trainer, start = _trainer(
        hf_path, with_ref=True, use_kl_loss=True, load=str(tmp_path / "new"), ref_load=str(tmp_path / "base")
    )
    assert start == 0
    assert all(torch.equal(value, _weights(base)[name]) for name, value in _weights(trainer).items())
    assert trainer.train(0, make_batch()).steps[0]["kl_loss"] == 0.0


def test_a_checkpoint_of_another_model_names_the_field_and_both_values(hf_path: Path, tmp_path: Path) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path / "ck"))
    trainer.save(0)
    make_hf_model("qwen3", tmp_path / "other", hidden_size=48, num_hidden_layers=3)
    with pytest.raises(ConfigError) as error:
        _trainer(tmp_path / "other", load=str(tmp_path / "ck"))
    assert "saved with hidden_size 32" in str(error.value)
    assert "with hidden_size 48" in str(error.value)
    assert "num_layers 2" in str(error.value)
    assert f"--load {tmp_path / 'ck'}" in str(error.value)


def test_hf_weights_that_do_not_fit_their_config_name_tensor_and_shapes(hf_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(hf_path, broken)
    make_hf_model("qwen3", tmp_path / "wide", intermediate_size=64)
    shutil.copy(tmp_path / "wide" / "model.safetensors", broken / "model.safetensors")
    with pytest.raises(ConfigError, match=r"gate_proj.*makes \[128, 32\].*needs \[96, 32\]"):
        _trainer(broken)


def test_missing_and_damaged_hf_weights_are_named(hf_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(hf_path, broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"--hf-checkpoint .*cannot read model.safetensors"):
        _trainer(broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no .safetensors file"):
        _trainer(broken)


def test_a_damaged_checkpoint_is_a_config_error(hf_path: Path, tmp_path: Path) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path))
    trainer.save(0)
    for shard in (tmp_path / "iter_0000000").glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ConfigError, match=f"--load {tmp_path}"):
        _trainer(hf_path, load=str(tmp_path))


def test_a_warm_up_longer_than_the_schedule_is_refused(hf_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lr-warmup-iters 10 is 10 steps of warm-up"):
        _trainer(hf_path, lr_warmup_iters=10)
