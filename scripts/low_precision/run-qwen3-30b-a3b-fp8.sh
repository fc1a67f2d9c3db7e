#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-30B-A3B, GRPO on math, on two nodes of eight shared GPUs: FP8 in the engines and in the matrix products of the
# trainer. `--fp8-param-gather` would halve its weights too, but needs the optimizer on the GPU.
# shellcheck source=../lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/launch.sh"

REF_LOAD="${REF_LOAD:-${MODEL_DIR}/Qwen3-30B-A3B_torch_dist}"
model qwen3-30B-A3B Qwen3-30B-A3B-FP8
colocate 2 8
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")
JOB_ENV+=("NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type math
   --num-rollout 200
   --rollout-batch-size 16
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 128
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --eval-max-response-len 16384)
PERF_ARGS=(
   --tensor-model-parallel-size 1
   --pipeline-model-parallel-size 4
   --context-parallel-size 1
   --expert-model-parallel-size 4 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 20480
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}" --use-tis)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.6
   --sglang-expert-parallel-size 8
   "${CUDA_GRAPH_SIZES[@]}"
)
PRECISION_ARGS=(
   --transformer-impl transformer_engine
   --bf16
   --fp8-format e4m3 --fp8-recipe blockwise
)
MISC_ARGS+=("${DEEPEP[@]}")

launch train.py "$@"
