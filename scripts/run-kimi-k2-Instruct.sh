#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Kimi K2 Instruct (1T), GRPO on math, on 32 nodes of eight shared GPUs. The engines serve FP8 weights, the trainer
# starts from a BF16 copy converted to a Megatron checkpoint.
# An engine has 32 GPUs: of 16, each would hold 63 GiB of weights, more than 70% of 80 GiB. On GPUs of more than 90 GiB
# --rollout-num-gpus-per-engine 16 --sglang-ep-size 16 gives twice as many engines.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

REF_LOAD="${REF_LOAD:-${MODEL_DIR}/Kimi-K2-Instruct_torch_dist}"
model kimi-k2 Kimi-K2-Instruct
colocate 32 8
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type math
   --num-rollout 100
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
   --pipeline-model-parallel-size 8
   --decoder-last-pipeline-num-layers 5
   --context-parallel-size 4
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 32
   --sglang-mem-fraction-static 0.7
   --sglang-dp-size 8
   "${DP_ATTENTION[@]}"
   --sglang-ep-size 32
   --sglang-server-concurrency 1024
   --sglang-watchdog-timeout 3600
   --update-weight-buffer-size $((2 * 1024 ** 3))
)
MISC_ARGS+=("${DEEPEP[@]}")

launch train.py "$@"
