#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-235B-A22B, GRPO on math, on eight nodes of eight shared GPUs. The engines serve an INT4 conversion; the trainer
# works in BF16 and rounds its weights to INT4 in every forward pass, as the engines will.
# shellcheck source=../lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/launch.sh"

REF_LOAD="${REF_LOAD:-${MODEL_DIR}/Qwen3-235B-A22B_torch_dist}"
model qwen3-235B-A22B Qwen3-235B-A22B-INT4
colocate 8 8
JOB_ENV+=("OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1" "OPEN_TRAINING_INT4_GROUP_SIZE=128" "NCCL_TIMEOUT_MS=36000000")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rollout-temperature 0.8
   --rm-type deepscaler
   --num-rollout 300
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 256
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --eval-top-p 0.7 --eval-max-response-len 16384)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 4
   --decoder-last-pipeline-num-layers 22
   --context-parallel-size 2
   --expert-model-parallel-size 16 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}" --use-tis)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   --sglang-ep-size 8
   "${CUDA_GRAPH_SIZES[@]}"
   --update-weight-buffer-size $((4 * 1024 ** 3))
)

launch train.py "$@"
