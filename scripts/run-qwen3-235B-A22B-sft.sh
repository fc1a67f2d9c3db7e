#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-235B-A22B, supervised fine-tuning on chat messages, on four nodes of eight GPUs.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model qwen3-235B-A22B Qwen3-235B-A22B
train_only 4 8
JOB_ENV+=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")

ROLLOUT_ARGS=("${SFT_ARGS[@]}")
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
OPTIMIZER_ARGS=("${SFT_OPTIMIZER_ARGS[@]}" "${CPU_OPTIMIZER[@]}")

launch train_async.py "$@"
