"""PPO on the real stack: policy and critic on the same slots, and a resume that continues both."""

from __future__ import annotations

from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_loop import grpo_flags


def test_ppo_trains_policy_and_critic_and_resumes_both(tiny_task, tmp_path):
    flags = grpo_flags(
        *(tiny_task, tmp_path, "--advantage-estimator", "ppo", "--gamma", 1.0, "--lambd", 0.95),
        *("--normalize-advantages", "--num-critic-only-steps", 1, "--kl-coef", 0.001, "--kl-loss-coef", 0),
        *("--save", tmp_path / "checkpoints", "--load", tmp_path / "checkpoints", "--save-interval", 3),
    )
    flags.remove("--use-kl-loss")
    for num_rollout in (3, 5):
        finished = run_train([*flags, "--num-rollout", num_rollout], tmp_path)
        assert finished.status == 0, finished.output[-4000:]
        assert finished.survivors() == []
    records = metrics(tmp_path / "run")
    assert values(records, "rollout/step") == list(range(5))
    value_losses = values(records, "train/critic-value_loss")
    assert len(value_losses) == 5
    assert all(0 < loss < 10 for loss in value_losses), value_losses
    assert len(values(records, "train/pg_loss")) == 4  # the first rollout trained the critic only
    for directory in ("checkpoints", "checkpoints/critic"):
        assert (tmp_path / directory / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
