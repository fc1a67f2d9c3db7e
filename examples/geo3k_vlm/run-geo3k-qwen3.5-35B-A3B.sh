#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3.5-35B-A3B with its vision tower, GRPO on Geometry3K (hiyouga/geometry3k), one problem a micro-batch.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3.5-35B-A3B-vl Qwen3.5-35B-A3B
colocate 1 "$(num_gpus)"

ROLLOUT_ARGS=(
   --prompt-data "${GEO3K_DATA:-${DATA_DIR}/geo3k/train.parquet}"
   --input-key problem
   --label-key answer
   --apply-chat-template
   --multimodal-keys '{"image": "images"}'
   --rollout-shuffle
   --rollout-temperature 1
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 64
   --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --global-batch-size 512
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --micro-batch-size 1
)
ALGO_ARGS=("${GRPO_ARGS[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   --sglang-ep-size 8
   --sglang-max-running-requests 512
   "${CUDA_GRAPH_SIZES[@]}"
   "${EAGLE[@]}" --sglang-speculative-num-steps 2 --sglang-speculative-num-draft-tokens 3
)

launch train.py "$@"
