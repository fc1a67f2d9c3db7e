#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-VL-8B, GRPO on Geometry3K with an environment that shows the picture again, larger, after a wrong answer.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-vl-8B Qwen3-VL-8B-Instruct
colocate 1 "$(num_gpus)"

ROLLOUT_ARGS=(
   --prompt-data "${GEO3K_DATA:-${DATA_DIR}/geo3k/train.parquet}"
   --input-key problem
   --label-key answer
   --apply-chat-template
   --multimodal-keys '{"image": "images"}'
   --rollout-shuffle
   --rollout-temperature 1
   --custom-generate-function-path examples.geo3k_vlm_multi_turn.rollout.generate --max-turns 3
   --custom-config-path "${SLIME_DIR}/examples/geo3k_vlm_multi_turn/geo3k.yaml"
   --num-rollout 3000
   --rollout-batch-size 64
   --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --global-batch-size 512
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --micro-batch-size 1
)
ALGO_ARGS=("${GRPO_ARGS[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.6
)

launch train.py "$@"
