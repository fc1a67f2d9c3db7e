#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-235B-A22B, GSPO on math: eight nodes train, eight generate.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model qwen3-235B-A22B Qwen3-235B-A22B
separate 8 8 64
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 8
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 64
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --eval-max-response-len 16384)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 4
   --decoder-last-pipeline-num-layers 22
   --context-parallel-size 2
   --expert-model-parallel-size 16 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
ALGO_ARGS=(--advantage-estimator gspo --eps-clip 4e-4 --entropy-coef 0.00 --kl-loss-coef 0.00 --kl-loss-type low_var_kl)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 32
   --sglang-mem-fraction-static 0.7
   --sglang-dp-size 4
   --sglang-enable-dp-attention --sglang-enable-dp-lm-head
   --sglang-ep-size 32
   --sglang-moe-a2a-backend deepep
   --sglang-deepep-mode auto
   "${CUDA_GRAPH_SIZES[@]}"
   --update-weight-buffer-size $((4 * 1024 ** 3))
)

launch train.py "$@"
