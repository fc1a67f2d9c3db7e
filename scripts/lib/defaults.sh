# shellcheck shell=bash disable=SC2034  # the arrays are for the scripts that source this
# What nearly every recipe shares. A script may assign any of these anew; a flag behind the script's name beats them all:
#
#   bash scripts/run-qwen3-4B.sh --lr 2e-6 --num-rollout 100

# Data: DAPO-Math-17k to train on, AIME 2024 to evaluate on; JSON Lines with `prompt` (chat messages) and `label`.
MATH_DATA="${MATH_DATA:-${DATA_DIR}/dapo-math-17k/dapo-math-17k.jsonl}"
AIME_DATA="${AIME_DATA:-${DATA_DIR}/aime-2024/aime-2024.jsonl}"
MATH_PROMPTS=(
   --prompt-data "${MATH_DATA}"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rollout-temperature 1
)
AIME_EVAL=(--eval-interval 20 --eval-prompt-data aime "${AIME_DATA}" --n-samples-per-eval-prompt 16 --eval-top-p 1)

# Supervised fine-tuning on chat messages (OpenHermes 2.5), with the trainer alone.
SFT_DATA="${SFT_DATA:-${DATA_DIR}/openhermes2_5.parquet}"
SFT_ARGS=(
   --rollout-function-path slime.rollout.sft_rollout.generate_rollout
   --prompt-data "${SFT_DATA}"
   --input-key messages
   --rollout-shuffle
   --num-epoch 3
   --rollout-batch-size 128
   --global-batch-size 128
   --loss-type sft_loss
   --calculate-per-token-loss
   --disable-compute-advantages-and-returns
)
SFT_OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-5
   --lr-decay-style cosine
   --min-lr 1e-6
   --lr-warmup-fraction 0.1
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

# Generate twice the prompts that a step needs and keep groups whose answers are neither all right nor all wrong.
DYNAMIC_SAMPLING=(
   --over-sampling-batch-size 256
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
)

# GRPO with asymmetric clipping ("clip higher" of DAPO). The KL loss is computed for its curve only: its weight is 0.
GRPO_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0.00)
KL_ARGS=(--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)
# Optimizer state and step in host memory, for models whose state does not fit beside weights and gradients.
CPU_OPTIMIZER=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)

RECOMPUTE_ALL=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
)
# DeepEP moves tokens between experts of different GPUs; its NVSHMEM must not share NCCL's resources.
DEEPEP=(--moe-token-dispatcher-type flex --moe-enable-deepep)

# One SGLang engine whose attention is data parallel and whose experts are spread over all its GPUs.
DP_ATTENTION=(--sglang-enable-dp-attention --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1)
# Speculative decoding with the model's own multi-token-prediction layer.
EAGLE=(
   --sglang-speculative-algorithm EAGLE
   --sglang-speculative-num-steps 3
   --sglang-speculative-eagle-topk 1
   --sglang-speculative-num-draft-tokens 4
)
# Batch sizes up to 256 for which the engine records CUDA graphs.
mapfile -t CUDA_GRAPH_SIZES < <(printf '%s\n' --sglang-cuda-graph-bs 1 2 4 8 && seq 16 8 256)

# wandb only on request: WANDB_PROJECT=my-project bash scripts/run-...sh (the key comes from `wandb login`).
TRACKING_ARGS=(${WANDB_PROJECT:+--use-wandb --wandb-project "${WANDB_PROJECT}" --wandb-group "${RUN_NAME}"})
