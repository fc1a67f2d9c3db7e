#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-30B-A3B, GRPO on math, on eight shared GPUs. The engines serve an INT4 conversion; the trainer works in BF16
# and rounds its weights to INT4 in every forward pass, as the engines will.
# shellcheck source=../lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/launch.sh"

REF_LOAD="${REF_LOAD:-${MODEL_DIR}/Qwen3-30B-A3B_torch_dist}"
model qwen3-30B-A3B Qwen3-30B-A3B-INT4
colocate 1 8
JOB_ENV+=("OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1" "OPEN_TRAINING_INT4_GROUP_SIZE=128" "NCCL_TIMEOUT_MS=36000000")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rollout-temperature 0.8
   --rm-type deepscaler
   --num-rollout 100
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 256
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --eval-top-p 0.7 --eval-max-response-len 16384)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}" --use-tis)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.7
   "${CUDA_GRAPH_SIZES[@]}"
)

launch train.py "$@"
