#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-4B, GRPO on math, on eight AMD GPUs.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

# Ray must leave the choice of devices to slime, which then sees all eight.
export RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES=1
export HIP_VISIBLE_DEVICES="${HIP_VISIBLE_DEVICES:-0,1,2,3,4,5,6,7}"

model qwen3-4B Qwen3-4B
colocate 1 8
JOB_ENV+=("RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES=1" "HIP_VISIBLE_DEVICES=${HIP_VISIBLE_DEVICES}")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 256
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --eval-max-response-len 16384)
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
# Trainer and engines keep their memory: giving it back takes torch_memory_saver, which not every ROCm has.
MISC_ARGS+=(--no-gradient-accumulation-fusion --no-offload-train --no-offload-rollout)

launch train.py "$@"
