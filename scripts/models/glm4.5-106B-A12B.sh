#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# zai-org/GLM-4.5-Air.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 46
   --hidden-size 4096
   --ffn-hidden-size 10944
   --num-attention-heads 96
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --add-qkv-bias
   --position-embedding-type rope
   --rotary-base 1000000
   --rotary-percent 0.5
   --normalization RMSNorm
   --num-experts 128
   --moe-layer-freq "[0]*1+[1]*45"
   --moe-ffn-hidden-size 1408
   --moe-router-topk 8
   --moe-shared-expert-intermediate-size 1408
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
