#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3-30B-A3B, GRPO of solvers, rewriters and a selector on eight shared GPUs.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3-30B-A3B Qwen3-30B-A3B
colocate 1 8

ROLLOUT_ARGS=(
   --prompt-data "${MATH_DATA}"
   --input-key prompt
   --label-key label
   --rollout-shuffle
   --rollout-temperature 1
   --rm-type deepscaler
   --custom-generate-function-path examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents
   --custom-config-path "${SLIME_DIR}/examples/multi_agent/multi_agent.yaml"
   --use-rollout-logprobs
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --global-batch-size 256
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 20480
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   "${CUDA_GRAPH_SIZES[@]}"
)

launch train.py "$@"
