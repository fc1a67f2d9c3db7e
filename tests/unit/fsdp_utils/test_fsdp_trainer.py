"""The FSDP trainer on one rank: objectives, optimizers and copies of other weights as with the Megatron backend."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.utils.errors import ConfigError, SlimeError
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, schedule, single_rank

USER = "tests.unit.megatron_utils.user_objectives"


@pytest.fixture(scope="module", autouse=True)
def _single_rank() -> Iterator[None]:
    with single_rank():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp_trainer")
    make_hf_model("qwen3", path, tie_word_embeddings=True, pad_token_id=7)  # samples have this token, and it is trained
    return path


def _two_steps(seed: int = 4) -> dict[str, Any]:
    return schedule(make_batch(seed=seed) | {"global_batch_sizes": [4, 4]}, [[0, 1, 2, 3], [4, 5, 6, 7]])


def _trainer(path: Path, backend: str = "fsdp", **settings: Any) -> Any:
    from slime.backends.fsdp_utils.actor import FsdpTrainer
    from slime.backends.megatron_utils.actor import MegatronTrainer

    args = make_args(path, train_backend=backend, **settings)
    made = {"fsdp": FsdpTrainer, "megatron": MegatronTrainer}[backend]
    trainer = made(args, rank=0, world_size=1, with_ref=args.use_kl_loss or args.kl_coef != 0)
    trainer.setup()
    return trainer


def _trained(path: Path, backend: str, num_rollouts: int = 2, **settings: Any) -> tuple[list[Any], dict[str, Any]]:
    trainer = _trainer(path, backend, **settings)
    reports = [trainer.train(rollout_id, _two_steps(rollout_id)) for rollout_id in range(num_rollouts)]
    return reports, {name: value.clone() for name, value in trainer.export_weights()}


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.01, "clip_grad": 0.3},
        {"use_stateless_adam": True, "lr": 1e-3, "weight_decay": 0.1},
        {"reset_optimizer_states": True, "lr": 1e-3},
        {"use_rollout_entropy": True, "lr": 1e-3},
        {"kl_coef": 0.1, "ref_update_interval": 1, "lr": 1e-3},
        {"loss_type": "custom_loss", "custom_loss_function_path": f"{USER}.same_loss", "lr": 1e-3},
        {"use_rollout_logprobs": True, "use_tis": True, "lr": 1e-3, "log_probs_chunk_size": 5},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_option_does_what_it_does_with_the_megatron_backend(checkpoint: Path, settings: dict[str, Any]) -> None:
    (ours, our_weights), (theirs, their_weights) = (
        _trained(checkpoint, backend, **settings) for backend in ("fsdp", "megatron")
    )
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip([*mine.steps, mine.rollout], [*other.steps, other.rollout], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=2e-6)
    for name, value in their_weights.items():
        torch.testing.assert_close(our_weights[name], value, atol=2e-5, rtol=0)


def test_integers_and_a_head_that_contradicts_the_config_are_not_trained(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(checkpoint / "model.safetensors")
    other_head = tensors["model.embed_tokens.weight"] + 1
    for change, problem in (
        ({name: tensors[name].to(torch.int8)}, "q_proj.weight in model.safetensors holds I8 numbers"),
        ({"lm_head.weight": other_head}, "tie_word_embeddings true, but lm_head.weight"),
    ):
        shutil.copytree(checkpoint, tmp_path / "hf", dirs_exist_ok=True)
        save_file(tensors | change, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(SlimeError, match=problem):
            _trainer(tmp_path / "hf")


def test_a_batch_is_judged_by_the_kept_weights_that_generated_it(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint, lr=1e-2)
    trainer.keep_version("0")
    first = trainer.train(0, _two_steps()).rollout["log_probs"]
    assert trainer.train(1, _two_steps() | {"generated_by": "0"}).rollout["log_probs"] == first
    assert trainer.train(2, _two_steps()).rollout["log_probs"] != first


def test_gradients_that_are_not_finite_stop_the_run_with_the_samples_at_fault_or_are_skipped(
    checkpoint: Path, tmp_path: Path
) -> None:
    bad = _two_steps()
    bad["rewards"][5] = float("nan")
    trainer = _trainer(checkpoint, save=str(tmp_path))
    with pytest.raises(
        SlimeError, match=r"rollout 0, step 1: gradients are NaN .*micro-batch 0 of rank 0, samples \[4"
    ):
        trainer.train(0, bad)
    trainer = _trainer(checkpoint, save=str(tmp_path), check_for_nan_in_loss_and_grad=False)
    before = {name: value.clone() for name, value in trainer.export_weights()}
    report = trainer.train(0, schedule(bad | {"global_batch_sizes": [8]}, [list(range(8))]))
    assert report.steps[0]["skipped_steps"] == 1
    assert all(torch.equal(before[name], value) for name, value in trainer.export_weights())


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_step_without_a_trained_token_moves_no_weight_by_momentum_or_decay(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    trainer = _trainer(checkpoint, backend, save=str(tmp_path), lr=1e-2, weight_decay=0.1)
    trainer.train(0, make_batch())  # leaves moments
    before = {name: value.clone() for name, value in trainer.export_weights()}
    removed = make_batch()
    for mask in removed["loss_masks"]:
        mask.fill_(0)
    (step,) = trainer.train(1, removed | {"rollout_mask_sums": torch.zeros(8)}).steps
    assert (step["skipped_steps"], step["grad_norm"]) == (1, 0)
    assert "rollout 1, step 0 skipped: none of its tokens is trained on" in caplog.text
    assert all(torch.equal(before[name], value) for name, value in trainer.export_weights())
    assert trainer.train(2, make_batch()).steps[0]["skipped_steps"] == 1


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_learning_rate_reaches_its_minimum_with_the_last_rollout(checkpoint: Path, backend: str) -> None:
    trainer = _trainer(checkpoint, backend, lr=1.0, min_lr=0.2, lr_decay_style="linear", num_rollout=4)
    batches = [make_batch(seed=i) for i in range(5)]
    rates = [trainer.train(i, batch).steps[0]["lr-pg_0"] for i, batch in enumerate(batches)]
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_cut_vocabulary_is_not_trained_as_if_it_had_been_whole(
    checkpoint: Path, tmp_path: Path, backend: str
) -> None:
    trainer = _trainer(checkpoint, backend, rollout_top_p=0.9, rollout_top_k=-1, save=str(tmp_path))
    with pytest.raises(SlimeError, match=r"--rollout-top-p 0\.9 .*no sample of the rollout says which ids"):
        trainer.train(0, make_batch())


def test_a_checkpoint_that_does_not_fit_is_refused_with_its_name(checkpoint: Path, tmp_path: Path) -> None:
    _trainer(checkpoint, save=str(tmp_path / "whole")).save(0)
    _trainer(checkpoint, save=str(tmp_path / "weights"), no_save_optim=True).save(0)
    other = tmp_path / "other"
    make_hf_model("qwen3", other, num_hidden_layers=3)
    for model, load in ((other, "whole"), (checkpoint, "weights")):
        with pytest.raises(ConfigError, match=f"--load .*{load}/iter_0000000 does not fit the model and optimizer"):
            _trainer(model, load=str(tmp_path / load))
    assert _trainer(checkpoint, load=str(tmp_path / "weights"), no_load_optim=True).train(1, _two_steps()).steps
    damaged = next((tmp_path / "whole" / "iter_0000000").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"is not a complete checkpoint: .*distcp has 100 bytes"):
        _trainer(checkpoint, load=str(tmp_path / "whole"))


class _Call:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_cannot_run_code(checkpoint: Path, tmp_path: Path) -> None:
    save, trace = tmp_path / "save", tmp_path / "ran"
    _trainer(checkpoint, save=str(save)).save(0)
    directory = save / "iter_0000000"
    (directory / "manifest.json").unlink()
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    metadata.planner_data = _Call(trace)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    _trainer(checkpoint, load=str(save))
    assert not trace.exists()


def test_a_save_that_fails_leaves_the_checkpoint_before_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.backends.fsdp_utils import checkpoint as module

    trainer = _trainer(checkpoint, save=str(tmp_path))
    trainer.save(0)
    monkeypatch.setattr(module.torch, "save", _no_space)
    with pytest.raises(SlimeError, match=r"could not be written: rank 0: OSError.*No space left"):
        trainer.save(1)
    monkeypatch.undo()
    assert _trainer(checkpoint, load=str(tmp_path)).train(1, _two_steps()).steps
    trainer.save(1)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


def _no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")
