#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3.5-35B-A3B (text tower), supervised fine-tuning on chat messages, on eight GPUs.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model qwen3.5-35B-A3B Qwen3.5-35B-A3B
train_only 1 8
JOB_ENV+=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")

ROLLOUT_ARGS=("${SFT_ARGS[@]}" --loss-mask-type qwen3_5)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
)
OPTIMIZER_ARGS=("${SFT_OPTIMIZER_ARGS[@]}" "${CPU_OPTIMIZER[@]}")
MISC_ARGS+=("${DEEPEP[@]}")

launch train_async.py "$@"
