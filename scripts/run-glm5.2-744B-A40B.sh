#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# GLM-5.2 (744B, sparse attention), GRPO on math, on 32 nodes of eight shared GPUs. Engines are divided into
# prefill and decode by a file (SGLANG_CONFIG_FILE), which is written here unless it is named; its KV cache is FP8.
# shellcheck source=lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"

model glm5.2-744B-A40B GLM-5.2
colocate 32 8
OWN_SGLANG_CONFIG="${SGLANG_CONFIG_FILE:-}"
SGLANG_CONFIG_FILE="${SGLANG_CONFIG_FILE:-${SAVE_DIR}/sglang.yaml}"
JOB_ENV+=("NVSHMEM_DISABLE_NCCL=1")
JOB_ENV+=("INDEXER_ROPE_NEOX_STYLE=${INDEXER_ROPE_NEOX_STYLE:-0}")
JOB_ENV+=("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=${SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK:-256}")

ROLLOUT_ARGS=(
   "${MATH_PROMPTS[@]}"
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 8
   --n-samples-per-prompt 8
   --rollout-max-response-len 65536
   --global-batch-size 64
   --balance-data
)
EVAL_ARGS=("${AIME_EVAL[@]}" --eval-max-response-len 65536)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 8
   --decoder-first-pipeline-num-layers 14
   --decoder-last-pipeline-num-layers 16
   --context-parallel-size 8
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
   --log-probs-chunk-size 1024
)
ALGO_ARGS=("${GRPO_ARGS[@]}" --kl-loss-coef 0.00 --kl-loss-type low_var_kl --use-tis --tis-clip-low 0.5)
OPTIMIZER_ARGS+=("${CPU_OPTIMIZER[@]}")
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 64
   --sglang-mem-fraction-static 0.70
   --sglang-config "${SGLANG_CONFIG_FILE}"
   --sglang-dp-size 64
   "${DP_ATTENTION[@]}"
   --sglang-ep-size 64
   --sglang-moe-a2a-backend deepep
   --sglang-deepep-mode auto
   --sglang-attention-backend nsa
   --sglang-nsa-prefill-backend flashmla_sparse
   --sglang-nsa-decode-backend flashmla_kv
   --sglang-kv-cache-dtype fp8_e4m3
   --sglang-page-size 64
   --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 4
   --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 5
   --sglang-speculative-draft-attention-backend nsa
   --sglang-cuda-graph-max-bs 8
   --sglang-max-running-requests 512
   --sglang-disable-overlap-schedule
   --sglang-watchdog-timeout 3600
   --sglang-disaggregation-transfer-backend mooncake
   --sglang-disaggregation-ib-device "${IB_DEVICES:-$(printf 'mlx5_%s,' {100..106})mlx5_107}"
)

if [[ -z "${OWN_SGLANG_CONFIG}" ]] && ! is_dry_run "$@"; then
   mkdir -p "${SAVE_DIR}"
   cat >"${SGLANG_CONFIG_FILE}" <<'YAML'
sglang:
  - name: default
    server_groups:
      - {worker_type: prefill, num_gpus: 64, num_gpus_per_engine: 64}
      - {worker_type: decode, num_gpus: 192, num_gpus_per_engine: 64}
YAML
fi

launch train.py "$@"
