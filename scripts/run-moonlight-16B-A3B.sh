#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Moonlight-16B-A3B (DeepSeek-V3 architecture), GRPO on math, on eight shared GPUs.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model moonlight Moonlight-16B-A3B-Instruct
colocate 1 8
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type math
   --num-rollout 3000
   --rollout-batch-size 128
   "${DYNAMIC_SAMPLING[@]}"
   --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --num-steps-per-rollout 4
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --n-samples-per-eval-prompt 8 --eval-max-response-len 4096)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   "${CUDA_GRAPH_SIZES[@]}"
)
MISC_ARGS+=("${DEEPEP[@]}")

launch train.py "$@"
