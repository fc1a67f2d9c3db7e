#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-4B-Base, supervised fine-tuning on chat messages, on eight GPUs.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model qwen3-4B Qwen3-4B-Base
train_only 1 8
JOB_ENV+=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")

ROLLOUT_ARGS=("${SFT_ARGS[@]}")
PERF_ARGS=(
   --tensor-model-parallel-size 1
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
OPTIMIZER_ARGS=("${SFT_OPTIMIZER_ARGS[@]}")

launch train_async.py "$@"
