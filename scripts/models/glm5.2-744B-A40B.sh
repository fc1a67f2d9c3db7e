#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# zai-org/GLM-5.2, zai-org/GLM-5.2-FP8.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --spec slime_plugins.models.glm5.glm5 get_glm5_spec
   --num-layers 78
   --hidden-size 6144
   --ffn-hidden-size 12288
   --num-attention-heads 64
   --kv-channels 192
   --vocab-size 154880
   --make-vocab-size-divisible-by 16
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --position-embedding-type rope --no-position-embedding
   --rotary-base 8000000
   --normalization RMSNorm
   --qk-layernorm
   --multi-latent-attention
   --q-lora-rank 2048
   --kv-lora-rank 512
   --qk-head-dim 192
   --qk-pos-emb-head-dim 64
   --v-head-dim 256
   --num-experts 256
   --moe-layer-freq "[0]*3+[1]*75"
   --moe-ffn-hidden-size 2048
   --moe-router-topk 8
   --moe-shared-expert-intermediate-size 2048
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
   --moe-router-topk-scaling-factor 2.5
   --moe-router-dtype fp32
   --moe-grouped-gemm
   --moe-permute-fusion
   --enable-experimental
   --allgather-cp
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
