#!/usr/bin/env bash
# Make the data, train the tiny model on solved conversations, then with the reward. About a minute without a GPU.
#
#   bash run.sh                                      results in outputs/my_task of this folder
#   ROLLOUTS=2 bash run.sh --experiment-name short   fewer rollouts; flags at the end are added to the last command
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="${HERE}${PYTHONPATH:+:${PYTHONPATH}}"  # your files can import each other
PYTHON="${PYTHON:-python}"
ROLLOUTS="${ROLLOUTS:-20}"

SMALL=(
   --fp32 --actor-num-gpus-per-node 1 --use-dynamic-batch-size --max-tokens-per-gpu 8192
   --adam-beta2 0.95 --output-dir "${HERE}/outputs"
)

"${PYTHON}" "${HERE}/data.py"

# A pretrained model needs no warm start: remove this command, and give the last one your --hf-checkpoint. If the reward
# stays flat in the training below, make the warm start longer: --num-rollout 4.
"${PYTHON}" -m slime train --hf-checkpoint "${HERE}/data/model" \
   --prompt-data "${HERE}/data/warm_start.jsonl" --input-key prompt \
   --debug-train-only --loss-type sft_loss --disable-compute-advantages-and-returns --loss-mask-type qwen3 \
   --rollout-function-path slime.rollout.sft_rollout.generate_rollout \
   --num-rollout 1 --rollout-batch-size 4800 --num-steps-per-rollout 150 --lr 2e-3 --lr-warmup-iters 20 \
   --save-hf "${HERE}/data/warm_start" --experiment-name warm_start "${SMALL[@]}"

"${PYTHON}" -m slime train --hf-checkpoint "${HERE}/data/warm_start" \
   --prompt-data "${HERE}/data/train.jsonl" --label-key label --apply-chat-template --rollout-shuffle \
   --custom-rm-path "${HERE}/reward.py" --custom-generate-function-path "${HERE}/generate.py" \
   --num-rollout "${ROLLOUTS}" --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 48 \
   --advantage-estimator grpo --lr 5e-4 \
   --eval-prompt-data my_task "${HERE}/data/eval.jsonl" --eval-interval 10 --eval-temperature 0 \
   --rollout-num-gpus 1 --sglang-context-length 256 --sglang-max-total-tokens 32768 \
   --save-hf "${HERE}/outputs/my_task/hf" --experiment-name my_task "${SMALL[@]}" "$@"
