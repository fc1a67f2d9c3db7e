"""Code around the trainer's passes: users' hooks, the dump of the trained samples, Adam without moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronCritic, MegatronTrainer
from slime.backends.training.optimizer import StatelessAdam
from tests.unit.megatron_utils import user_trainer_hooks
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, schedule, single_rank

USER = "tests.unit.megatron_utils.user_trainer_hooks"
HOOKS = {
    "custom_megatron_init_path": f"{USER}.after_init",
    "custom_megatron_before_log_prob_hook_path": f"{USER}.before_log_prob",
    "custom_megatron_before_train_step_hook_path": f"{USER}.before_step",
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with single_rank():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_hf_model("qwen3", path)
    return path


@pytest.fixture
def calls() -> Iterator[list[tuple[Any, ...]]]:
    user_trainer_hooks.CALLS.clear()
    yield user_trainer_hooks.CALLS
    user_trainer_hooks.CALLS.clear()


def two_steps() -> dict[str, Any]:
    return schedule(make_batch(seed=4) | {"global_batch_sizes": [4, 4]}, [[0, 1, 2, 3], [4, 5, 6, 7]])


def started(path: Path, **settings: Any) -> MegatronTrainer:
    with_ref = settings.pop("with_ref", False)
    trainer = MegatronTrainer(make_args(path, **settings), rank=0, world_size=1, with_ref=with_ref)
    trainer.setup()
    return trainer


def weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.export_weights()}


def test_hooks_run_before_their_pass_and_in_its_order(model: Path, calls: list[Any]) -> None:
    trainer = started(model, with_ref=True, use_kl_loss=True, kl_loss_coef=0.1, **HOOKS)
    assert calls == [("init", 1e-2, True, 1)]
    trainer.train(7, two_steps())
    assert calls[1:] == [
        ("log_prob", 1e-2, 1, "ref_"),
        ("log_prob", 1e-2, 1, ""),
        ("step", 7, 0, 0.0),
        ("step", 7, 1, 0.0),
    ]


def test_the_critic_calls_them_as_well(model: Path, calls: list[Any]) -> None:
    critic = MegatronCritic(make_args(model, advantage_estimator="ppo", **HOOKS), rank=0, world_size=1)
    critic.setup()
    critic.train(2, make_batch())
    assert [call[0] for call in calls] == ["init", "log_prob", "step"]


def test_a_hook_before_a_step_decides_what_the_step_does(model: Path) -> None:
    path = f"{USER}.freeze_first_step"
    trainer = started(model, custom_megatron_before_train_step_hook_path=path, weight_decay=0.0)
    before = weights(trainer)
    trainer.train(0, make_batch())
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_the_dump_holds_what_every_sample_was_trained_with(model: Path, tmp_path: Path) -> None:
    template = str(tmp_path / "dumps" / "{rollout_id}_{rank}.pt")
    trainer = started(model, save_debug_train_data=template, with_ref=True, use_kl_loss=True, kl_loss_coef=0.1)
    batch = make_batch(seed=3)
    batch["partition"] = [5, 3, 1, 7, 0, 2, 6, 4]
    report = trainer.train(4, batch)
    (file,) = (tmp_path / "dumps").iterdir()
    assert file.name == "4_0.pt"
    dump = torch.load(file, weights_only=True)
    assert (dump["format_version"], dump["rollout_id"], dump["rank"]) == (2, 4, 0)
    assert [sample["rollout_position"] for sample in dump["samples"]] == list(range(8))
    assert dump["raw_reward"] == batch["raw_reward"]
    total = 0.0
    for sample in dump["samples"]:
        source = batch["partition"].index(sample["rollout_position"])
        assert sample["sample_index"] == batch["sample_indices"][source]
        assert torch.equal(sample["tokens"], batch["tokens"][source])
        for name in ("log_probs", "ref_log_probs", "advantages", "rollout_log_probs", "loss_masks"):
            assert len(sample[name]) == sample["response_lengths"] == batch["response_lengths"][source]
        mask = sample["loss_masks"]
        if mask.any():
            total += float((sample["log_probs"] * mask).sum() / mask.sum())
    assert total / 8 == pytest.approx(report.rollout["log_probs"], abs=1e-5)
    (shard,) = dump["dp_shards"]
    assert shard["micro_batch_indices"] == batch["micro_batch_indices"]
    assert not {"tokens", "raw_reward"} & set(shard)


def test_right_samples_report_their_entropy(model: Path) -> None:
    settings = {"use_rollout_entropy": True, "log_correct_samples": True}
    batch = make_batch(seed=2)
    everything = started(model, **settings).train(0, batch | {"raw_reward": [1.0] * 8})
    none = started(model, **settings).train(0, batch | {"raw_reward": [0.5] * 8})
    assert "correct_entropy" not in none.rollout
    assert 0 < everything.rollout["correct_entropy"] < 4.2  # log(61)
    one = started(model, **settings).train(0, batch | {"raw_reward": [1.0, *[0.0] * 6, 1.0]})  # the first has no token
    assert one.rollout["correct_entropy"] != pytest.approx(everything.rollout["correct_entropy"], abs=1e-6)


def test_stateless_adam_is_adam_that_forgets_after_every_step() -> None:
    torch.manual_seed(1)
    start, gradients = torch.randn(5, 3), torch.randn(4, 5, 3)
    mine, its = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    common: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}
    stateless = StatelessAdam([mine], **common)
    for gradient in gradients:
        adam = torch.optim.AdamW([its], **common)  # fresh: no moments
        mine.grad, its.grad = gradient.clone(), gradient.clone()
        stateless.step()
        adam.step()
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)
    assert not stateless.state
    assert stateless.param_groups[0]["step"] == 1


@pytest.mark.parametrize("precision", [{"fp32": True}, {"fp32": False, "bf16": True}])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_trainer_without_moments_equals_adam_that_is_reset_before_every_rollout(
    model: Path, precision: dict[str, Any], is_sharded: bool
) -> None:
    common = {"use_distributed_optimizer": is_sharded, "weight_decay": 0.1, "lr": 1e-3, **precision}
    stateless = started(model, use_stateless_adam=True, no_save_optim=True, **common)
    reset = started(model, reset_optimizer_states=True, **common)
    start = weights(reset)
    for rollout_id in range(2):
        stateless.train(rollout_id, make_batch(seed=rollout_id))
        reset.train(rollout_id, make_batch(seed=rollout_id))
    after = weights(reset)
    assert any(not torch.equal(after[name], start[name]) for name in after)
    for name, value in weights(stateless).items():
        torch.testing.assert_close(value, after[name], rtol=1e-5, atol=1e-5)
    optimizer = stateless._ready.optimizer
    inner = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    assert all(isinstance(one, StatelessAdam) and not one.state for one in inner)


def test_a_run_without_moments_resumes_from_a_checkpoint_without_optimizer(model: Path, tmp_path: Path) -> None:
    common = {"use_stateless_adam": True, "no_save_optim": True, "save": str(tmp_path / "ckpt"), "lr": 1e-3}
    first = started(model, **common)
    first.train(0, make_batch())
    first.save(0)
    kept = weights(first)
    second = started(model, load=common["save"], **common)
    assert all(torch.equal(value, kept[name]) for name, value in weights(second).items())
    first.train(1, make_batch(seed=1))
    second.train(1, make_batch(seed=1))
    for name, value in weights(first).items():
        torch.testing.assert_close(weights(second)[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_postprocess_function_sees_the_log_probs_whatever_the_number_of_steps(model: Path, num_steps: int) -> None:
    trainer = started(model)
    seen: list[Any] = []
    trainer._custom = dataclasses.replace(
        trainer._custom, postprocess=lambda args, rollout_id, rollout_data: seen.append(rollout_data.get("log_probs"))
    )
    size = 8 // num_steps
    batch = make_batch() | {"global_batch_sizes": [size] * num_steps}
    trainer.train(0, schedule(batch, [list(range(i, i + size)) for i in range(0, 8, size)]))
    assert [len(row) for row in seen[0] or []] == batch["response_lengths"]
