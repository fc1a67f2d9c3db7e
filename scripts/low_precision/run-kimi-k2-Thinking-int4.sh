#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Kimi K2 Thinking (1T), GRPO on math, on 32 nodes of eight shared GPUs. The engines serve the published INT4 weights;
# the trainer works in BF16 and rounds its weights to INT4 in every forward pass, as the engines will.
# An engine has 16 GPUs: of 8, each would hold 60 GiB of weights, more than 70% of 80 GiB. On GPUs of more than 86 GiB
# --rollout-num-gpus-per-engine 8 --sglang-ep-size 8 gives twice as many engines.
# shellcheck source=../lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/launch.sh"

REF_LOAD="${REF_LOAD:-${MODEL_DIR}/Kimi-K2-Thinking_torch_dist}"
model kimi-k2-thinking Kimi-K2-Thinking
colocate 32 8
JOB_ENV+=("OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1" "OPEN_TRAINING_INT4_GROUP_SIZE=32" "NCCL_TIMEOUT_MS=36000000")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rollout-temperature 0.8
   --rm-type math
   --num-rollout 100
   --rollout-batch-size 128
   "${DYNAMIC_SAMPLING[@]}"
   --n-samples-per-prompt 8
   --rollout-max-response-len 16384
   --num-steps-per-rollout 4
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --n-samples-per-eval-prompt 8 --eval-top-p 0.7 --eval-max-response-len 16384)
PERF_ARGS=(
   --tensor-model-parallel-size 8 --sequence-parallel
   --pipeline-model-parallel-size 8
   --decoder-last-pipeline-num-layers 5
   --context-parallel-size 4
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}" --use-tis)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 16
   --sglang-mem-fraction-static 0.7
   --sglang-ep-size 16
   --sglang-server-concurrency 1024
   --sglang-watchdog-timeout 3600
   --update-weight-buffer-size $((2 * 1024 ** 3))
)

launch train.py "$@"
