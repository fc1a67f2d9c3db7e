#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-4B, GRPO in environments. ENVIRONMENT_DATA is a file that slime tasks wrote, of one or several environments.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-4B Qwen3-4B
colocate 1 "$(num_gpus)"

ROLLOUT_ARGS=(
   --prompt-data "${ENVIRONMENT_DATA}"
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --rollout-temperature 1
   --custom-generate-function-path slime.environments.rollout.generate
   --rollout-max-context-len 16384
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
   --use-dynamic-batch-size --max-tokens-per-gpu 18432
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-tool-call-parser qwen25
   --sglang-reasoning-parser qwen3
)

launch train.py "$@"
