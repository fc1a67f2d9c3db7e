#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# GLM-5 (744B, sparse attention), GRPO on math, on 32 nodes of eight shared GPUs. One engine fills prompts,
# the others decode.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model glm5-744B-A40B GLM-5
colocate 32 8
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")
JOB_ENV+=("INDEXER_ROPE_NEOX_STYLE=${INDEXER_ROPE_NEOX_STYLE:-0}")
JOB_ENV+=("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=${SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK:-256}")

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
   --pipeline-model-parallel-size 4
   --decoder-last-pipeline-num-layers 18
   --context-parallel-size 2
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
   --log-probs-chunk-size 1024
)
ALGO_ARGS=("${GRPO_ARGS[@]}" --kl-loss-coef 0.00 --kl-loss-type low_var_kl)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 64
   --sglang-mem-fraction-static 0.70
   --prefill-num-servers 1
   --sglang-dp-size 64
   "${DP_ATTENTION[@]}"
   --sglang-ep-size 64
   --sglang-moe-a2a-backend deepep
   --sglang-deepep-mode auto
   --sglang-attention-backend nsa
   --sglang-nsa-prefill-backend flashmla_sparse
   --sglang-nsa-decode-backend flashmla_sparse
   --sglang-page-size 64
   "${EAGLE[@]}"
   --sglang-cuda-graph-max-bs 8
   --sglang-max-running-requests 512
   --sglang-chunked-prefill-size 131072
   --sglang-watchdog-timeout 3600
)
MISC_ARGS+=("${DEEPEP[@]}")

launch train.py "$@"
