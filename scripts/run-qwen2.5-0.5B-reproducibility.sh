#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen2.5-0.5B on GSM8K, bitwise reproducible: two runs of this script print the same numbers.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model qwen2.5-0.5B Qwen2.5-0.5B-Instruct
colocate 1 8
JOB_ENV+=("NCCL_ALGO=Ring" "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" "CUBLAS_WORKSPACE_CONFIG=:4096:8")

ROLLOUT_ARGS=(
   --prompt-data "${GSM8K_DATA:-${DATA_DIR}/gsm8k/train.parquet}"
   --input-key messages
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rollout-temperature 1
   --rm-type math
   --num-rollout 100
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 1024
   --global-batch-size 256
   --balance-data
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data gsm8k "${GSM8K_TEST_DATA:-${DATA_DIR}/gsm8k/test.parquet}")
PERF_ARGS=(
   --tensor-model-parallel-size 1
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}" --calculate-per-token-loss)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.7
   --sglang-enable-deterministic-inference
   --sglang-attention-backend flashinfer
)
TRACKING_ARGS=(--use-wandb --wandb-project "${WANDB_PROJECT:-slime}" --wandb-group "${RUN_NAME}")
MISC_ARGS+=(--deterministic-mode)

launch train.py "$@"
