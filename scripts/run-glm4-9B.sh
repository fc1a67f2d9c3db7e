#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# GLM-Z1-9B, GRPO on math: four GPUs train, four generate.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model glm4-9B GLM-Z1-9B-0414
separate 1 4 4

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 256
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --eval-max-response-len 16384)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 2
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 4608
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
)

launch train.py "$@"
