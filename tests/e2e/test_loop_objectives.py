"""Objectives beyond GRPO through the real stack: KL in the rewards, whitening, importance weights, several steps."""

from __future__ import annotations

from tests.e2e.running import PLUGINS, metrics, run_train, values


def test_reinforce_plus_plus_with_importance_weights_learns_over_two_steps_per_rollout(tiny_task, tmp_path):
    flags = [
        *("--hf-checkpoint", tiny_task.model, "--prompt-data", tiny_task.train, "--label-key", "label"),
        *("--apply-chat-template", "--rollout-shuffle", "--custom-rm-path", f"{PLUGINS}:share_of_sevens"),
        *("--rollout-batch-size", 16, "--n-samples-per-prompt", 8, "--rollout-max-response-len", 8),
        *("--num-rollout", 5, "--num-steps-per-rollout", 2, "--lr", "2e-3", "--min-lr", "2e-3"),
        *("--fp32", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096),
        *("--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1),
        *("--sglang-context-length", 128, "--sglang-max-total-tokens", 16384),
        *("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages", "--gamma", 1.0),
        *("--kl-coef", 0.001, "--kl-loss-type", "k2", "--entropy-coef", 0.001, "--use-opsm", "--opsm-delta", 0.1),
        *("--use-tis", "--tis-threshold", 1.5, "--tis-clip-low", 0.5, "--use-rollout-entropy"),
        *("--rollout-top-p", 0.97),
        *("--custom-tis-function-path", "slime.backends.megatron_utils.loss.icepop_function"),
        *("--output-dir", tmp_path, "--experiment-name", "run"),
    ]
    done = run_train(flags, tmp_path)
    assert done.status == 0, done.output[-4000:]
    records = metrics(tmp_path / "run")
    rewards = values(records, "rollout/raw_reward")
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.05, rewards
    assert values(records, "rollout/kl")[0] == 0.0
    assert values(records, "rollout/kl")[-1] > 0.0
    steps = values(records, "train/tis_clipfrac")
    assert len(steps) == 10
    assert max(steps) == 0.0, "trainer and engine agree, so no weight leaves the bounds"
    assert max(values(records, "train/train_rollout_logprob_abs_diff")) < 1e-4, "about the cut distribution"
    assert all(1 < size < 100 for size in values(records, "rollout/top_p_kept_vocab_per_token"))
    assert max(abs(value - 1) for value in values(records, "train/tis")) < 1e-3
    assert max(abs(kl) for kl in values(records, "train/ppo_kl")[1::2]) > 0.0
    assert len(values(records, "rollout/entropy")) == 5
    assert done.survivors() == []
