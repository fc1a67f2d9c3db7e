#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Qwen3.5-35B-A3B, GRPO of a coding agent on eight nodes that trainer and engines share. SWE_DATA is a file of tasks,
# CODING_CONFIG a copy of coding_agent.yaml.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen3.5-35B-A3B Qwen3.5-35B-A3B
colocate "${ACTOR_NUM_NODES:-8}" "${ACTOR_NUM_GPUS_PER_NODE:-8}"
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")
for name in "${!SLIME_AGENT_@}"; do JOB_ENV+=("${name}=${!name}"); done # of harness and sandbox, see docs/agents.md

ROLLOUT_ARGS=(
   --prompt-data "${SWE_DATA:-${DATA_DIR}/swe/train.jsonl}"
   --input-key prompt
   --label-key label
   --metadata-key metadata
   --rollout-shuffle
   --rollout-temperature 1
   --custom-generate-function-path examples.coding_agent_rl.generate.generate
   --custom-config-path "${CODING_CONFIG:-${SLIME_DIR}/examples/coding_agent_rl/coding_agent.yaml}"
   --rollout-max-context-len "${MAX_CONTEXT_LEN:-131072}"
   --num-rollout 100
   --rollout-batch-size 8
   --n-samples-per-prompt 8
   --rollout-max-response-len "${MAX_GEN_LEN:-16384}"
   --num-steps-per-rollout 1
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size "${CP_SIZE:-8}"
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
ALGO_ARGS=("${GRPO_ARGS[@]}" "${KL_ARGS[@]}")
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
MISC_ARGS+=("${DEEPEP[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   --sglang-dp-size 8 --sglang-ep-size 8
   "${DP_ATTENTION[@]}"
   --sglang-tool-call-parser qwen3_coder
   --sglang-reasoning-parser qwen3
)

launch train.py "$@"
