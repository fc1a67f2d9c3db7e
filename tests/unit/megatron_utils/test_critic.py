"""The critic against transformers: values, GAE returns, the clipped value loss, its gradient and its checkpoint."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronCritic, MegatronTrainer
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, schedule
from tests.verification import verify

GAMMA, LAMBDA, CLIP = 0.97, 0.9, 0.05


pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("policy")
    return path, make_hf_model("qwen3", path, tie_word_embeddings=True)


def critic(path: Path, **overrides: Any) -> MegatronCritic:
    settings = {"advantage_estimator": "ppo", "gamma": GAMMA, "lambd": LAMBDA, "value_clip": CLIP, "clip_grad": 0.5}
    trainer = MegatronCritic(make_args(path, **(settings | overrides)), rank=0, world_size=1)
    trainer.setup()
    return trainer


def head_of(trainer: MegatronCritic) -> Any:
    from slime.backends.megatron_utils.model.gpt import unwrap

    return unwrap(trainer._ready.chunks[0]).output_layer


class Oracle(torch.nn.Module):
    """transformers' trunk with a linear head, and PPO's value loss as loops over tokens."""

    def __init__(self, hf: Any, head: Any) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(hf.model)
        self.weight = torch.nn.Parameter(head.weight.detach().clone())
        self.bias = torch.nn.Parameter(head.bias.detach().clone())

    def values(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        tokens, length = batch["tokens"][index], batch["response_lengths"][index]
        hidden = self.trunk(tokens[None]).last_hidden_state[0]
        return (hidden @ self.weight.T + self.bias)[len(tokens) - length - 1 : len(tokens) - 1, 0]

    def loss(self, batch: dict[str, Any], samples: list[int], old: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for index in samples:
            values, before, mask = self.values(batch, index), old[index].double(), batch["loss_masks"][index]
            returns, following, advantage = [0.0] * len(before), 0.0, 0.0
            for t in reversed(range(len(before))):
                reward = batch["rewards"][index] if t == len(before) - 1 else 0.0
                reward -= batch["kl_coef"] * float(batch["kl"][index][t])
                advantage = reward + GAMMA * following - float(before[t]) + GAMMA * LAMBDA * advantage
                returns[t], following = advantage + float(before[t]), float(before[t])
            of_sample = torch.zeros(())
            for t in range(len(before)):
                moved = (values[t] - old[index][t]).clamp(-CLIP, CLIP)
                error = torch.maximum((old[index][t] + moved - returns[t]) ** 2, (values[t] - returns[t]) ** 2)
                of_sample = of_sample + error * int(mask[t])
            total = total + of_sample / max(1, int(mask.sum()))
        return total / len(samples)


def test_two_value_steps_equal_per_token_loops_with_torch_adamw(tied: tuple[Path, Any]) -> None:
    path, hf = tied
    steps = [[0, 1, 2, 3], [4, 5, 6, 7]]
    batch = schedule(make_batch(seed=3) | {"global_batch_sizes": [4, 4]}, steps)
    batch |= {"kl_coef": 0.5, "kl": [torch.randn(length) for length in batch["response_lengths"]]}
    trainer = critic(path, lr=2e-2, weight_decay=0.1, global_batch_size=4, kl_coef=0.5)
    oracle = Oracle(hf, head_of(trainer))
    matrices = [p for p in oracle.parameters() if p.ndim > 1]
    vectors = [p for p in oracle.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-2, betas=(0.9, 0.999), eps=1e-8)
    with torch.no_grad():
        old = [oracle.values(batch, index) for index in range(8)]
    report, values = trainer.train_values(0, batch)
    for ours, theirs in zip(values, old, strict=True):
        verify("values of the critic", "transformers and a linear head", ours, theirs, tolerance=1e-4, scale="mixed")
    for step, samples in enumerate(steps):
        loss = oracle.loss(batch, samples, old)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        optimizer.step()
        value_loss = report.steps[step]["critic-value_loss"]
        verify("value loss of two steps", "torch AdamW", value_loss, loss.item(), tolerance=1e-4, scale="relative")
        assert report.steps[step]["critic-grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert report.steps[1]["critic-value_clipfrac"] > 0  # the second step starts from the first step's values


def test_the_kl_of_a_policy_takes_no_second_pass_when_it_trains(
    tied: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, passes = [], []
    batch = make_batch(seed=6)
    batch["values"] = [torch.randn(length) for length in batch["response_lengths"]]
    for is_asked in (False, True):
        trainer = MegatronTrainer(
            make_args(tied[0], advantage_estimator="ppo", kl_coef=0.5, lr=1e-2), rank=0, world_size=1, with_ref=True
        )
        trainer.setup()
        outputs = trainer._outputs
        monkeypatch.setattr(trainer, "_outputs", lambda *a, outputs=outputs: passes.append(1) or outputs(*a))
        trainer.train(0, batch)  # away from the reference
        kl = trainer.reward_kl(1, batch) if is_asked else []
        reports.append(trainer.train(1, batch))
    assert reports[0] == dataclasses.replace(reports[1], seconds=reports[0].seconds)
    assert reports[0].seconds.keys() == reports[1].seconds.keys()
    assert len(passes) == 2 * 4  # two passes of each rollout: reference and policy
    means = [float((v * m).sum() / max(1, m.sum())) for v, m in zip(kl, batch["loss_masks"], strict=True)]
    assert reports[1].rollout["kl"] == pytest.approx(sum(means) / 8, rel=1e-4)
    assert abs(reports[1].rollout["kl"]) > 1e-3


def test_the_critic_learns_what_a_response_is_worth(tied: tuple[Path, Any]) -> None:
    trainer = critic(tied[0], lr=5e-3, value_clip=10.0, gamma=1.0, lambd=1.0)
    batch = make_batch(seed=4)
    losses = [trainer.train(step, batch).steps[0]["critic-value_loss"] for step in range(10)]
    assert losses[-1] < 0.5 * losses[0], losses


def test_the_report_of_a_critic_tells_of_the_rollout_as_a_policys_does(tied: tuple[Path, Any]) -> None:
    batch = make_batch(seed=4)
    report, values = critic(tied[0]).train_values(0, batch)
    assert report.rollout["raw_reward"] == pytest.approx(sum(batch["raw_reward"]) / 8)
    assert report.rollout["response_lengths"] == pytest.approx(sum(batch["response_lengths"]) / 8)
    masks = batch["loss_masks"]
    means = [float((v * m).sum() / max(1, m.sum())) for v, m in zip(values, masks, strict=True)]
    assert report.rollout["values"] == pytest.approx(sum(means) / 8, abs=1e-5)
    assert {"rewards", "returns", "advantages", "total_lengths"} <= report.rollout.keys()


def test_a_resumed_critic_continues_bit_for_bit_with_its_head(tied: tuple[Path, Any], tmp_path: Path) -> None:
    batch = make_batch(seed=5)
    first = critic(tied[0], save=str(tmp_path))
    first.train(0, batch)
    first.save(0)
    expected = first.train(1, batch).steps[0]
    second = critic(tied[0], load=str(tmp_path))
    assert second.train(1, batch).steps[0] == expected


def test_the_critics_moments_are_zeroed_before_every_rollout_as_well(tied: tuple[Path, Any]) -> None:
    from slime.backends.megatron_utils.optimizer import parts_of

    trainer = critic(tied[0], reset_optimizer_states=True)
    for rollout_id in range(3):
        trainer.train(rollout_id, make_batch(seed=rollout_id))
    states = [state for part in parts_of(trainer._ready.optimizer) for state in part.optimizer.state.values()]
    assert {float(state["step"]) for state in states} == {1.0}


@pytest.mark.parametrize("loss_type", ["policy_loss", "custom_loss"])
def test_without_a_trained_token_the_critic_does_not_move_whatever_the_policys_loss_is(
    tied: tuple[Path, Any], tmp_path: Path, loss_type: str
) -> None:
    trainer = critic(tied[0], loss_type=loss_type, output_dir=str(tmp_path), weight_decay=0.1)
    trainer.train(0, make_batch())  # leaves moments
    before = head_of(trainer).weight.detach().clone()
    removed = make_batch()
    for mask in removed["loss_masks"]:
        mask.fill_(0)
    (step,) = trainer.train(1, removed | {"rollout_mask_sums": torch.zeros(8)}).steps
    assert step["critic-skipped_steps"] == 1
    assert torch.equal(head_of(trainer).weight, before)


def test_the_fresh_head_of_a_critic_learns_also_if_the_policys_head_is_frozen(tied: tuple[Path, Any]) -> None:
    trainer = critic(tied[0], freeze_params_name_list=["embedding", "output_layer"])
    before = head_of(trainer).weight.detach().clone()
    trainer.train(0, make_batch())
    assert not torch.equal(head_of(trainer).weight, before)
