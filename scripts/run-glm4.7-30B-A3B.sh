#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# GLM-4.7-Flash, GRPO on math, on eight shared GPUs. Its MTP layer drafts tokens for the engines and is trained along.
# slime's recipe has two pipeline stages and spreads the experts over eight GPUs: that takes 16 GPUs, since a stage holds
# all of its experts. On eight GPUs one stage keeps EP 8.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model glm4.7-30B-A3B GLM-4.7-Flash
colocate 1 8
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 128
   --n-samples-per-prompt 8
   --rollout-max-response-len 32768
   --global-batch-size 1024
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --eval-max-response-len 32768)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 2
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 32768
   --log-probs-chunk-size 1024
)
ALGO_ARGS=(--advantage-estimator grpo --entropy-coef 0.00 "${KL_ARGS[@]}")
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
MTP_ARGS=(--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.8
   --sglang-dp-size 8
   "${DP_ATTENTION[@]}"
   "${EAGLE[@]}"
   --sglang-cuda-graph-max-bs 64
   --sglang-max-running-requests 512
)
MISC_ARGS+=("${DEEPEP[@]}")

launch train.py "$@"
