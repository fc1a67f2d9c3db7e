#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# deepseek-ai/DeepSeek-R1, deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-V3-0324, deepseek-ai/DeepSeek-V3.1. Set
# MODEL_ARGS_NUM_LAYERS before sourcing to change it.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-61}"
   --hidden-size 7168
   --ffn-hidden-size 18432
   --num-attention-heads 128
   --kv-channels 128
   --vocab-size 129280
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --position-embedding-type rope
   --rotary-base 10000
   --no-rope-fusion
   --rotary-scaling-factor 40
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --qk-layernorm
   --multi-latent-attention
   --q-lora-rank 1536
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --mscale 1.0
   --mscale-all-dim 1.0
   --num-experts 256
   --moe-layer-freq "[0]*3+[1]*$((${MODEL_ARGS_NUM_LAYERS:-61} - 3))"
   --moe-ffn-hidden-size 2048
   --moe-router-topk 8
   --moe-shared-expert-intermediate-size 2048
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
   --moe-router-num-groups 8
   --moe-router-group-topk 4
   --moe-router-topk-scaling-factor 2.5
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
   --attention-softmax-in-fp32
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
