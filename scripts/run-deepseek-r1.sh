#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# DeepSeek-R1, GRPO on math, on 16 nodes of eight shared GPUs. The engines serve the FP8 weights of the hub;
# the trainer starts from a BF16 copy converted to a Megatron checkpoint.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

REF_LOAD="${REF_LOAD:-${MODEL_DIR}/DeepSeek-R1_torch_dist}"
model deepseek-v3 DeepSeek-R1
colocate 16 8
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 128
   "${DYNAMIC_SAMPLING[@]}"
   --n-samples-per-prompt 8
   --rollout-max-response-len 32768
   --num-steps-per-rollout 4
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --n-samples-per-eval-prompt 8 --eval-max-response-len 32768)
PERF_ARGS=(
   --tensor-model-parallel-size 8 --sequence-parallel
   --pipeline-model-parallel-size 4
   --decoder-last-pipeline-num-layers 13
   --context-parallel-size 4
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 64
   --sglang-mem-fraction-static 0.7
   --sglang-dp-size 8
   "${DP_ATTENTION[@]}"
   --sglang-ep-size 64
   --sglang-moe-a2a-backend deepep
   --sglang-deepep-mode auto
   "${EAGLE[@]}"
   --sglang-server-concurrency 1024
   --sglang-watchdog-timeout 3600
)
MISC_ARGS+=("${DEEPEP[@]}")

launch train.py "$@"
