#!/usr/bin/env bash
# shellcheck disable=SC2034  # launch reads the arrays by name
# Search-R1: GRPO with a search server, local_search_server.py or another that answers POST /retrieve.
# SEARCH_CONFIG is a copy of search.yaml with its address.
# shellcheck source=../../scripts/lib/launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/launch.sh"

model qwen2.5-3B Qwen2.5-3B
colocate 1 4

ROLLOUT_ARGS=(
   --prompt-data "${SEARCH_DATA:-${DATA_DIR}/nq_hotpotqa_train/train.jsonl}"
   --input-key prompt
   --label-key answers
   --apply-chat-template
   --rollout-shuffle
   --rollout-temperature 1
   --custom-generate-function-path examples.search-r1.generate_with_search.generate --max-turns 2
   --custom-rm-path examples.search-r1.generate_with_search.reward_func --reward-key score
   --custom-config-path "${SEARCH_CONFIG:-${SLIME_DIR}/examples/search-r1/search.yaml}"
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 512
   --global-batch-size 256
   --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   "${RECOMPUTE_ALL[@]}"
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
ALGO_ARGS=("${GRPO_ARGS[@]}" --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

launch train.py "$@"
