#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# GLM-4.7 (355B), GSPO on math, on ACTOR_NUM_NODES x ACTOR_NUM_GPUS_PER_NODE shared GPUs.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model glm4.7-355B-A32B GLM-4.7
colocate "${ACTOR_NUM_NODES:-8}" "${ACTOR_NUM_GPUS_PER_NODE:-8}"
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 128
   "${DYNAMIC_SAMPLING[@]}"
   --n-samples-per-prompt 8
   --rollout-max-response-len 32768
   --rollout-stop-token-ids 151329 151336 151338 # end of text, user, observation
   --num-steps-per-rollout 4
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --n-samples-per-eval-prompt 8 --eval-max-response-len 32768)
PERF_ARGS=(
   --tensor-model-parallel-size 8 --sequence-parallel
   --pipeline-model-parallel-size 4
   --context-parallel-size 2
   --expert-model-parallel-size 16 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
ALGO_ARGS=(--advantage-estimator gspo --eps-clip 1e-4 --eps-clip-high 2e-4 --entropy-coef 0.00 --kl-loss-coef 0.00 --kl-loss-type low_var_kl --use-tis)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 32
   --sglang-mem-fraction-static 0.7
   --sglang-dp-size 4
   "${DP_ATTENTION[@]}"
   --sglang-ep-size 32
   "${EAGLE[@]}"
)
MISC_ARGS+=("${DEEPEP[@]}")

launch train.py "$@"
