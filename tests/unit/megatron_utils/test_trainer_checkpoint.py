"""Saving, resuming and refusing checkpoints, with real files and one rank."""

from __future__ import annotations

import json
import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import transformer_config
from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.utils.errors import ConfigError, SlimeError
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, weights_of

pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_hf_model("qwen3", path)
    return path


def _trainer(path: Path, *, with_ref: bool = False, **overrides: Any) -> tuple[MegatronTrainer, int]:
    settings = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "weight_decay": 0.1} | overrides
    trainer = MegatronTrainer(make_args(path, **settings), rank=0, world_size=1, with_ref=with_ref)
    return trainer, trainer.setup()


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
    want, got = weights_of(straight), weights_of(resumed)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    "settings",
    [{}, {"fp32": False, "bf16": True}, {"use_distributed_optimizer": False}],
    ids=["fp32", "bf16", "plain-adam"],
)
def test_a_checkpoint_of_experts_with_a_parameter_each_continues_with_grouped_experts(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_family_checkpoint("qwen3_moe", tmp_path / "hf")
    with monkeypatch.context() as patch:
        stock = transformer_config._experts
        patch.setattr(transformer_config, "_experts", lambda *args: stock(*args) | {"moe_grouped_gemm": False})
        patch.setattr("slime.backends.megatron_utils.layer_specs.group_experts", lambda layer: None)
        sequential, _ = _trainer(tmp_path / "hf", save=str(tmp_path / "ck"), **settings)
    names = [name for name, _ in sequential._ready.chunks[0].named_parameters()]
    assert any("local_experts.3.linear_fc1" in name for name in names)
    sequential.train(0, make_batch())
    sequential.save(0)
    saved = weights_of(sequential)

    grouped, start = _trainer(tmp_path / "hf", load=str(tmp_path / "ck"), **settings)
    assert start == 1
    loaded = weights_of(grouped)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    expected, found = (trainer.train(1, make_batch(seed=1)).steps[0] for trainer in (sequential, grouped))
    assert found == pytest.approx(expected, rel=1e-5 if settings.get("fp32", True) else 1e-2)
    # A tenth of the learning rate: without the states, Adam would make whole steps.
    want, got = weights_of(sequential), weights_of(grouped)
    differences = torch.cat([(got[name] - want[name]).float().abs().flatten() for name in want])
    assert differences.quantile(0.99) < 1e-3


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


@pytest.mark.parametrize(("keeps", "rate"), [(False, 5e-4), (True, 1e-3)])
def test_a_resumed_run_has_the_learning_rate_of_its_command_line(
    keeps: bool, rate: float, hf_path: Path, tmp_path: Path
) -> None:
    settings = {"lr_decay_style": "constant", "lr_warmup_iters": 0, "min_lr": 0.0}
    trainer, _ = _trainer(hf_path, save=str(tmp_path), lr=1e-3, **settings)
    trainer.train(0, make_batch())
    trainer.save(0)
    resumed, _ = _trainer(hf_path, load=str(tmp_path), lr=5e-4, use_checkpoint_opt_param_scheduler=keeps, **settings)
    assert resumed.train(1, make_batch()).steps[0]["lr-pg_0"] == pytest.approx(rate)


def test_finetune_no_load_optim_and_ckpt_step_choose_what_is_taken(hf_path: Path, tmp_path: Path) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path))
    trainer.train(0, make_batch())
    trainer.save(0)
    after_one = weights_of(trainer)
    trainer.train(1, make_batch())
    trainer.save(1)

    at_step, start = _trainer(hf_path, load=str(tmp_path), ckpt_step=0)
    assert start == 1
    assert all(torch.equal(value, after_one[name]) for name, value in weights_of(at_step).items())

    finetuned, start = _trainer(hf_path, load=str(tmp_path), finetune=True)
    assert start == 0
    assert finetuned.train(0, make_batch()).steps[0]["lr-pg_0"] == pytest.approx(0.0)  # the warm-up starts again

    weights_only, start = _trainer(hf_path, load=str(tmp_path), no_load_optim=True, no_load_rng=True)
    assert start == 2
    assert all(torch.equal(value, weights_of(trainer)[name]) for name, value in weights_of(weights_only).items())


def test_weights_saved_without_optimizer_can_be_loaded_without(hf_path: Path, tmp_path: Path) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path), no_save_optim=True, no_save_rng=True)
    trainer.train(0, make_batch())
    trainer.save(0)
    loaded, start = _trainer(hf_path, load=str(tmp_path), no_load_optim=True, no_load_rng=True)
    assert start == 1
    assert all(torch.equal(value, weights_of(trainer)[name]) for name, value in weights_of(loaded).items())
    with pytest.raises(ConfigError, match=f"--load {tmp_path}"):
        _trainer(hf_path, load=str(tmp_path))


def test_a_torch_dist_reference_is_used_for_kl_and_as_start_while_load_is_empty(hf_path: Path, tmp_path: Path) -> None:
    base, _ = _trainer(hf_path, save=str(tmp_path / "base"))
    base.train(0, make_batch())
    base.train(1, make_batch())
    base.save(1)
    trainer, start = _trainer(
        hf_path,
        with_ref=True,
        use_kl_loss=True,
        load=str(tmp_path / "new"),
        save=str(tmp_path / "new"),
        ref_load=str(tmp_path / "base"),
    )
    assert start == 0
    assert all(torch.equal(value, weights_of(base)[name]) for name, value in weights_of(trainer).items())
    assert trainer.train(0, make_batch()).steps[0]["kl_loss"] == 0.0


def test_a_converted_checkpoint_in_load_is_where_a_new_run_starts(hf_path: Path, tmp_path: Path) -> None:
    base, _ = _trainer(hf_path, save=str(tmp_path / "run"), no_save_optim=True, no_save_rng=True)
    base.train(0, make_batch())
    base.save(0)
    (tmp_path / "run" / "iter_0000000").rename(tmp_path / "run" / "release")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release")
    trainer, start = _trainer(hf_path, load=str(tmp_path / "run"))
    assert start == 0
    assert all(torch.equal(value, weights_of(base)[name]) for name, value in weights_of(trainer).items())
    assert trainer.train(0, make_batch()).steps[0]["lr-pg_0"] == 0.0  # of the warm-up's first step


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


def test_a_checkpoint_written_in_the_background_holds_the_weights_of_the_moment_it_was_asked_for(
    hf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.backends.training import pieces

    original, may_write, in_background = pieces.write, threading.Event(), []

    def write(parts: Any, directory: Path, stage: str, *arguments: Any) -> Any:
        if stage == "copied":
            in_background.append(sum(piece.num_bytes for piece in parts))
            assert may_write.wait(60)
        return original(parts, directory, stage, *arguments)

    monkeypatch.setattr(pieces, "write", write)
    trainer, _ = _trainer(hf_path, save=str(tmp_path), async_save=True, num_rollout=10)
    trainer.train(0, make_batch(seed=0))
    at_save = weights_of(trainer)
    trainer.save(0)
    trainer.train(1, make_batch(seed=1))  # the weights change before anything is written
    may_write.set()
    trainer.save(1)  # waits for the first
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "0"
    trainer.save(9)  # the run's last checkpoint is complete when the call returns
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "9"

    loaded, start = _trainer(hf_path, load=str(tmp_path), ckpt_step=0)
    assert start == 1
    assert all(torch.equal(value, at_save[name]) for name, value in weights_of(loaded).items())


def test_a_background_save_is_completed_by_the_next_training_step_that_finds_it_written(
    hf_path: Path, tmp_path: Path
) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path), async_save=True, num_rollout=10)
    trainer.save(0)
    trainer._writer._pending.thread.join(60)
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()
    trainer.train(0, make_batch())
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "0"


def test_a_background_save_is_completed_when_the_run_ends(hf_path: Path, tmp_path: Path) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path), async_save=True, num_rollout=10)
    trainer.finish_saves()  # there is none yet
    trainer.save(0)
    trainer.finish_saves()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "0"


@pytest.mark.parametrize("is_finished", [True, False])
def test_the_ranks_compare_their_progress_until_all_shards_are_written_or_the_time_is_over(
    hf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_finished: bool
) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path), async_save=True, num_rollout=10)
    trainer.save(0)
    trainer.finish_saves()
    from slime.backends.megatron_utils.checkpoint import writer

    write, compare = writer.checksums_of, writer._Pending.compare
    may_end, num_compared = threading.Event(), 0

    def progress(pending: Any, timeout_s: float) -> tuple[bool, bool, bool]:
        nonlocal num_compared
        num_compared += 1
        if is_finished and num_compared == 3:
            may_end.set()
        return compare(pending, timeout_s)

    monkeypatch.setattr(writer, "checksums_of", lambda paths: may_end.wait(60) and write(paths))
    monkeypatch.setattr(writer, "_POLL_S", 0.01)
    trainer.save(1)
    writing = trainer._writer._pending.thread
    monkeypatch.setattr(writer._Pending, "compare", progress)
    if is_finished:
        trainer.finish_saves()
        assert num_compared >= 3
    else:
        trainer._writer._timeout_s = 0.1
        with pytest.raises(SlimeError, match="iter_0000001 could not be written: rank 0: TimeoutError: still writing"):
            trainer.finish_saves()
        may_end.set()
        writing.join()
        trainer._writer._timeout_s = 600.0
        trainer.save(9)  # the last of the run, after a save that was given up
        assert _trainer(hf_path, load=str(tmp_path))[1] == 10
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == ("1" if is_finished else "9")


def test_a_torn_latest_checkpoint_gives_way_to_the_one_before_and_says_so(
    hf_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path))
    trainer.save(0)
    at_zero = weights_of(trainer)
    trainer.train(1, make_batch())
    trainer.save(1)
    shard = sorted((tmp_path / "iter_0000001").glob("*.distcp"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    resumed, start = _trainer(hf_path, load=str(tmp_path), save=str(tmp_path))
    assert start == 1
    assert all(torch.equal(value, at_zero[name]) for name, value in weights_of(resumed).items())
    assert f"{shard.name} has" in caplog.text
    assert "Falling back to iter_0000000" in caplog.text


def test_only_the_newest_checkpoints_are_kept_with_their_data_states(hf_path: Path, tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    trainer, _ = _trainer(hf_path, save=str(tmp_path), keep_last_checkpoints=2)
    foreign = tmp_path / "iter_0000000"
    foreign.mkdir()
    (foreign / "metadata.json").write_text("{}")  # complete, but not written by us
    for rollout_id in (1, 3, 5):
        (tmp_path / "rollout" / f"global_dataset_state_dict_{rollout_id}.json").write_text("{}")
        trainer.save(rollout_id)
    assert sorted(entry.name for entry in tmp_path.glob("iter_*")) == ["iter_0000000", "iter_0000003", "iter_0000005"]
    states = sorted(entry.name for entry in (tmp_path / "rollout").iterdir())
    assert states == ["global_dataset_state_dict_3.json", "global_dataset_state_dict_5.json"]


def test_a_manifest_says_what_belongs_to_the_checkpoint(hf_path: Path, tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "global_dataset_state_dict_4.json").write_text("{}")
    trainer, _ = _trainer(hf_path, save=str(tmp_path), no_save_rng=True)
    trainer.save(4)
    directory = tmp_path / "iter_0000004"
    manifest = json.loads((directory / "manifest.json").read_text())
    assert (manifest["iteration"], manifest["rollout_id"], manifest["weight_version"]) == (4, 4, "5")
    assert manifest["content"] == {"optimizer": True, "rng": False}
    assert manifest["layout"]["world_size"] == 1
    assert manifest["data_state"] == {"rollout/global_dataset_state_dict_4.json": 2}
    assert manifest["files"] == {
        file.name: file.stat().st_size for file in directory.iterdir() if file.name != "manifest.json"
    }


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_as_the_latest(
    hf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = _trainer(hf_path, save=str(tmp_path))
    trainer.save(0)
    from slime.backends.training import pieces

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pieces, "write", full)
    with pytest.raises(SlimeError, match=r"iter_0000001 could not be written: rank 0: OSError.*No space left"):
        trainer.save(1)
    assert _trainer(hf_path, load=str(tmp_path))[1] == 1


def test_a_disk_that_takes_only_part_of_a_checkpoint_is_told_as_one(hf_path: Path, tmp_path: Path) -> None:
    """torch's file format reports a short write as an unexpected position, in an error outside ``Exception``."""
    trainer, _ = _trainer(hf_path, save=str(tmp_path))
    trainer.save(0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(SlimeError, match=r"iter_0000001 could not be written: rank 0: .*Is the disk full\?"):
            trainer.save(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert _trainer(hf_path, load=str(tmp_path))[1] == 1
    trainer.save(1)
    assert _trainer(hf_path, load=str(tmp_path))[1] == 2
