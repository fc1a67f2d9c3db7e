#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-8B, GRPO through an agent of the Strands SDK (pip install strands-agents openai) on eight shared GPUs.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-8B Qwen3-8B
colocate 1 8

ROLLOUT_ARGS=(
   --prompt-data "${MATH_DATA}"
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --rollout-temperature 1
   --custom-generate-function-path examples.strands_sglang.generate_with_strands.generate
   --custom-config-path "${SLIME_DIR}/examples/strands_sglang/strands.yaml"
   --num-rollout 3000
   --rollout-batch-size 16
   --n-samples-per-prompt 8
   --rollout-max-response-len 16384
   --global-batch-size 128
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
   --sglang-mem-fraction-static 0.4
   --sglang-tool-call-parser qwen25
   --sglang-reasoning-parser qwen3
)

launch train.py "$@"
