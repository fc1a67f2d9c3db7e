#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# MiMo-7B-RL, GRPO on math, on eight shared GPUs. Its MTP layer drafts tokens for the engines and is trained along.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model mimo-7B-rl MiMo-7B-RL
colocate 1 8

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
MTP_ARGS=(--enable-mtp-training --mtp-loss-scaling-factor 0.2)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.7
   --sglang-attention-backend fa3
   "${EAGLE[@]}"
)

launch train.py "$@"
