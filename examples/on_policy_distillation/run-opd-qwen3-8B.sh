#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-8B learns from a larger model's log-probs of its own responses. TEACHER_URL is the teacher's server:
#   python3 -m sglang.launch_server --model-path Qwen3-32B --port 13141 --tp 2
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-8B Qwen3-8B
separate 1 2 4

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --use-opd --opd-type sglang
   --rm-url "${TEACHER_URL:-http://127.0.0.1:13141/generate}"
   --custom-rm-path slime.rollout.on_policy_distillation.reward_func
   --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
   --num-rollout 300
   --rollout-batch-size 16
   --n-samples-per-prompt 4
   --rollout-max-response-len 16384
   --global-batch-size 64
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
ALGO_ARGS=(--advantage-estimator grpo --entropy-coef 0.00 "${KL_ARGS[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.4
)

launch train.py "$@"
