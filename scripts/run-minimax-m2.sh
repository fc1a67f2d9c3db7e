#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# MiniMax-M2.5 (229B), GRPO on math, on 16 nodes of eight shared GPUs, with curves in TensorBoard.
# slime's recipe has EP 4: a rank then takes 207 GiB by the estimate of `--plan`. EP 32 fits into 80 GiB.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model minimax-m2 MiniMax-M2.5
colocate 16 8

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 128
   "${DYNAMIC_SAMPLING[@]}"
   --n-samples-per-prompt 8
   --rollout-max-response-len 32768
   --num-steps-per-rollout 4
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --n-samples-per-eval-prompt 8 --eval-max-response-len 32768)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 2
   --context-parallel-size 1
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
   --log-probs-chunk-size 1024
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 16
   --sglang-mem-fraction-static 0.7
   --sglang-ep-size 16
)
TRACKING_ARGS=(--use-tensorboard --tb-project-name slime --tb-experiment-name "${RUN_NAME}")

launch train.py "$@"
