#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-4B, GRPO on math with the reward and the filter of custom_rm.py.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-4B Qwen3-4B
colocate 1 "$(num_gpus)"

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --custom-rm-path "${SLIME_DIR}/examples/custom_reward/custom_rm.py" --rm-timeout 60
   --dynamic-sampling-filter-path "${SLIME_DIR}/examples/custom_reward/custom_rm.py:keep_mixed_groups"
   --over-sampling-batch-size 64
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 256
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

launch train.py "$@"
