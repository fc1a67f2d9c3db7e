#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# ReTool: GRPO with a Python sandbox, from the model that run-retool-qwen3-4B-sft.sh has trained and --save-hf has
# written to retool-sft.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-4B retool-sft
colocate 1 4

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --custom-generate-function-path examples.retool.generate_with_retool.generate --max-turns 8
   --custom-rm-path examples.retool.generate_with_retool.reward_func --reward-key score
   --custom-config-path "${SLIME_DIR}/examples/retool/retool.yaml"
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
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

launch train.py "$@"
