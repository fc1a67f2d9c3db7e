#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# ReTool's first step: supervised fine-tuning on conversations with code and its output. SFT_DATA is a file of them.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-4B Qwen3-4B
train_only 1 8

ROLLOUT_ARGS=(
   "${SFT_ARGS[@]}"
   --save-hf "${MODEL_DIR}/retool-sft"
)
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
