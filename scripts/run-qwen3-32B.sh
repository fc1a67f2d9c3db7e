#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-32B, GRPO on math, on eight shared GPUs; the optimizer state lives in host memory.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model qwen3-32B Qwen3-32B
colocate 1 8

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --num-rollout 5
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 256
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --eval-max-response-len 16384)
PERF_ARGS=(
   --tensor-model-parallel-size 8 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 20480
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   "${CUDA_GRAPH_SIZES[@]}"
)

launch train.py "$@"
