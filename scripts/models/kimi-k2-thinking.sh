#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# moonshotai/Kimi-K2-Thinking. Published in INT4; training needs it converted to BF16 first.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 61
   --hidden-size 7168
   --ffn-hidden-size 18432
   --num-attention-heads 64
   --kv-channels 64
   --vocab-size 163840
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --position-embedding-type rope
   --rotary-base 50000
   --no-rope-fusion
   --rotary-scaling-factor 64.0
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --qk-layernorm
   --multi-latent-attention
   --q-lora-rank 1536
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --mscale 1.0
   --mscale-all-dim 1.0
   --num-experts 384
   --moe-layer-freq "[0]*1+[1]*60"
   --moe-ffn-hidden-size 2048
   --moe-router-topk 8
   --moe-shared-expert-intermediate-size 2048
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
   --moe-router-num-groups 1
   --moe-router-group-topk 1
   --moe-router-topk-scaling-factor 2.827
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
   --attention-softmax-in-fp32
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
