#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-8B learns from the log-probs of a teacher in the trainer (OPD_TEACHER_LOAD), a model of the same shape.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-8B Qwen3-8B
separate 1 2 4

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type math
   --use-opd --opd-type megatron
   --opd-teacher-load "${OPD_TEACHER_LOAD:-${MODEL_DIR}/Qwen3-8B-teacher}"
   --num-rollout 300
   --rollout-batch-size 16
   --n-samples-per-prompt 4
   --rollout-max-response-len 16384
   --global-batch-size 64
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
ALGO_ARGS=(--advantage-estimator grpo --entropy-coef 0.00 "${KL_ARGS[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.4
)

launch train.py "$@"
