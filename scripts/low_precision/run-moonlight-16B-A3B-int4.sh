#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Moonlight-16B-A3B, GRPO on math, on four shared GPUs. The engines serve an INT4 conversion; the trainer works in BF16
# and rounds its weights to INT4 in every forward pass, as the engines will.
# shellcheck source=../lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/launch.sh"

REF_LOAD="${REF_LOAD:-${MODEL_DIR}/Moonlight-16B-A3B-Instruct_torch_dist}"
model moonlight Moonlight-16B-A3B-Instruct-INT4
colocate 1 4
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")
JOB_ENV+=("OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1" "OPEN_TRAINING_INT4_GROUP_SIZE=128" "NCCL_TIMEOUT_MS=36000000")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rollout-temperature 0.8
   --rm-type math
   --num-rollout 3000
   --rollout-batch-size 128
   "${DYNAMIC_SAMPLING[@]}"
   --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --num-steps-per-rollout 4
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --n-samples-per-eval-prompt 8 --eval-top-p 0.7 --eval-max-response-len 4096)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 4 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 4
   --sglang-mem-fraction-static 0.7
   "${CUDA_GRAPH_SIZES[@]}"
)
MISC_ARGS+=("${DEEPEP[@]}")

launch train.py "$@"
