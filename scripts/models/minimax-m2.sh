#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# MiniMaxAI/MiniMax-M2.5, MiniMaxAI/MiniMax-M2. Q and K are normalised over all heads together, which needs the
# plugin.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec
   --num-layers 62
   --hidden-size 3072
   --ffn-hidden-size 1536
   --num-attention-heads 48
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 200064
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --position-embedding-type rope
   --rotary-base 5000000
   --rotary-percent 0.5
   --no-rope-fusion
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --qk-layernorm
   --num-experts 256
   --moe-layer-freq "[1]*62"
   --moe-ffn-hidden-size 1536
   --moe-router-topk 8
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-enable-expert-bias
   --moe-router-load-balancing-type none
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-grouped-gemm
   --moe-permute-fusion
   --attention-softmax-in-fp32
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
