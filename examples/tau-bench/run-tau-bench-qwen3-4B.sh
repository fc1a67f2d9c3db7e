#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-4B-Instruct, GRPO on the retail tasks of tau-bench with a language model as the user: set GEMINI_API_KEY, or
# another provider in a copy of tau.yaml (TAU_CONFIG). TAU_DATA has rows {"prompt": "0", "label": ""}, one per task.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-4B-Instruct-2507 Qwen3-4B-Instruct-2507
colocate 1 "$(num_gpus)"
if [[ -n "${GEMINI_API_KEY:-}" ]]; then JOB_ENV+=("GEMINI_API_KEY=${GEMINI_API_KEY}"); fi

ROLLOUT_ARGS=(
   --prompt-data "${TAU_DATA:-${DATA_DIR}/tau-bench/retail_train.jsonl}"
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --rollout-temperature 1
   --custom-generate-function-path examples.tau-bench.generate_with_tau.generate --max-turns 30
   --custom-config-path "${TAU_CONFIG:-${SLIME_DIR}/examples/tau-bench/tau.yaml}"
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --num-rollout 500
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 1024
   --global-batch-size 256
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.7
   --sglang-tool-call-parser qwen25
)

launch train.py "$@"
