#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# GLM-4.7-Flash, GRPO on math: two nodes train, two generate and get weights as differences through a shared directory.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model glm4.7-30B-A3B GLM-4.7-Flash
separate 2 8 16

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --update-weight-mode delta
   --update-weight-transport disk
   --update-weight-disk-dir "${WEIGHT_DIR:-${OUTPUT_DIR}/${RUN_NAME}-weights}"
   --update-weight-local-checkpoint-dir "${LOCAL_WEIGHT_DIR:-/tmp/${RUN_NAME}-weights}"
   --num-rollout 3
   --rollout-batch-size 32
   --n-samples-per-prompt 4
   --rollout-max-response-len 8192
   --global-batch-size 128
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 2
   --decoder-last-pipeline-num-layers 23
   --context-parallel-size 2
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 32768
)
ALGO_ARGS=(--advantage-estimator grpo --entropy-coef 0.00 --use-kl-loss --kl-loss-coef 0.0 --kl-loss-type low_var_kl)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.8
   --sglang-dp-size 8
   --sglang-enable-dp-attention
)

launch train.py "$@"
