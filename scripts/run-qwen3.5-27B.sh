#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3.5-27B (gated delta nets and attention), GRPO on math, on ACTOR_NUM_NODES x ACTOR_NUM_GPUS_PER_NODE shared
# GPUs. CP_SIZE spreads each sequence over more of them.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model qwen3.5-27B Qwen3.5-27B
colocate "${ACTOR_NUM_NODES:-4}" "${ACTOR_NUM_GPUS_PER_NODE:-8}"

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 8
   --n-samples-per-prompt 8
   --rollout-max-response-len 32768
   --global-batch-size 64
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --eval-max-response-len 32768)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 2
   --decoder-last-pipeline-num-layers 30
   --context-parallel-size "${CP_SIZE:-4}"
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
   --log-probs-chunk-size 1024
)
ALGO_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --entropy-coef 0.00 --kl-loss-coef 0.00 --kl-loss-type low_var_kl --calculate-per-token-loss)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.75
   --sglang-mamba-scheduler-strategy extra_buffer
   "${EAGLE[@]}"
)

launch train.py "$@"
