#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# zai-org/GLM-4.7-Flash. GLM-4.7-Flash, whose attention is MLA; GLM-4.7 itself is glm4.7-355B-A32B.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 47
   --hidden-size 2048
   --ffn-hidden-size 10240
   --num-attention-heads 20
   --kv-channels 192
   --vocab-size 154880
   --make-vocab-size-divisible-by 64
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --add-qkv-bias
   --position-embedding-type rope --no-position-embedding
   --rotary-base 1000000
   --no-rope-fusion
   --normalization RMSNorm
   --qk-layernorm
   --multi-latent-attention
   --q-lora-rank 768
   --kv-lora-rank 512
   --qk-head-dim 192
   --qk-pos-emb-head-dim 64
   --v-head-dim 256
   --num-experts 64
   --moe-layer-freq "[0]*1+[1]*46"
   --moe-ffn-hidden-size 1536
   --moe-router-topk 4
   --moe-shared-expert-intermediate-size 1536
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
   --moe-router-topk-scaling-factor 1.8
   --moe-router-dtype fp32
   --moe-grouped-gemm
   --moe-permute-fusion
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
