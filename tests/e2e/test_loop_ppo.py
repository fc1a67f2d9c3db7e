"""PPO on the real stack: policy and critic on the same slots, and a resume that continues both."""

from __future__ import annotations

from pathlib import Path

from tests.doc_commands import ROOT, blocks, shown_flags
from tests.e2e.running import metrics, run_train, values


def readers_files(directory: Path) -> None:
    """The additions of the pages to their commands: a reward, and the differences between actor and critic."""
    [reward] = [
        code for code in blocks(ROOT / "docs/en/get_started/quick_start.md", "python") if "def reward_func" in code
    ]
    (directory / "my_reward.py").write_text(reward)
    [roles] = [code for code in blocks(ROOT / "docs/en/get_started/usage.md", "yaml") if "role: critic" in code]
    (directory / "roles.yaml").write_text(roles)


def test_ppo_trains_policy_and_critic_and_resumes_both(tiny_task, tmp_path):
    readers_files(tmp_path)
    flags = [
        *shown_flags("docs/en/get_started/quick_start.md", "train.py --hf-checkpoint MODEL"),
        *("--hf-checkpoint", tiny_task.model, "--prompt-data", tiny_task.train, "--rollout-batch-size", 16),
        *("--rollout-max-response-len", 8, "--rollout-num-gpus", 1, "--fp32", "--max-tokens-per-gpu", 4096),
        *("--use-dynamic-batch-size", "--sglang-context-length", 128, "--sglang-max-total-tokens", 16384),
        *shown_flags("docs/en/get_started/usage.md", "--advantage-estimator ppo"),
        *("--gamma", 1.0, "--lambd", 0.95, "--normalize-advantages", "--num-critic-only-steps", 1),
        *("--kl-coef", 0.001, "--load", "outputs/my_task/checkpoints", "--save-interval", 2),
    ]
    for num_rollout in (2, 3):
        finished = run_train([*flags, "--num-rollout", num_rollout], tmp_path)
        assert finished.status == 0, finished.output[-4000:]
        assert finished.survivors() == []
    records = metrics(tmp_path / "outputs" / "my_task")
    assert values(records, "rollout/step") == list(range(3))
    assert len(values(records, "rollout/raw_reward")) == 3
    value_losses = values(records, "train/critic-value_loss")
    assert len(value_losses) == 3
    assert all(0 < loss < 10 for loss in value_losses), value_losses
    assert len(values(records, "train/pg_loss")) == 2  # the first rollout trained the critic only
    for directory in ("outputs/my_task/checkpoints", "outputs/my_task/checkpoints/critic"):
        assert (tmp_path / directory / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
