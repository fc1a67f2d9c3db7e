#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-4B, GRPO on math, evaluated on the sets of EVAL_CONFIG: a file like eval.yaml with your data.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-4B Qwen3-4B
colocate 1 "$(num_gpus)"

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --log-passrate
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
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
EVAL_ARGS=(--eval-config "${EVAL_CONFIG:-${SLIME_DIR}/examples/eval_multi_task/eval.yaml}" --eval-interval 20)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

launch train.py "$@"
