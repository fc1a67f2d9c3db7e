#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3.5-9B, GRPO with generations that never stop: engines and trainer on separate GPUs.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3.5-9B Qwen3.5-9B
separate 1 "${ACTOR_GPUS:-4}" "${ROLLOUT_GPUS:-4}"

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
   --max-weight-staleness 2
   --num-rollout 3
   --rollout-batch-size 8
   --n-samples-per-prompt 4
   --rollout-max-response-len 2048
   --global-batch-size 32
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 4096
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}" --use-tis)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

launch train_async.py "$@"
