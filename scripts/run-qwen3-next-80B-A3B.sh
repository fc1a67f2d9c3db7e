#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-Next-80B-A3B (gated delta nets and attention), GSPO on math, on ACTOR_NUM_NODES x ACTOR_NUM_GPUS_PER_NODE
# shared GPUs. CP_SIZE spreads each sequence over more of them.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model qwen3-next-80B-A3B Qwen3-Next-80B-A3B-Thinking
colocate "${ACTOR_NUM_NODES:-4}" "${ACTOR_NUM_GPUS_PER_NODE:-8}"
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")

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
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 4
   --decoder-last-pipeline-num-layers 9
   --context-parallel-size "${CP_SIZE:-4}"
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
   --log-probs-chunk-size 1024
)
ALGO_ARGS=(--advantage-estimator gspo --eps-clip 4e-4 --entropy-coef 0.00 --kl-loss-coef 0.00 --kl-loss-type low_var_kl)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.8
   --sglang-ep-size 8
   "${CUDA_GRAPH_SIZES[@]}"
   --sglang-max-running-requests 256
   "${EAGLE[@]}"
)
MISC_ARGS+=("${DEEPEP[@]}")

launch train.py "$@"
