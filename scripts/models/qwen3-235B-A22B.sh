#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen3-235B-A22B, Qwen/Qwen3-235B-A22B-FP8. The 2507 releases need MODEL_ARGS_ROTARY_BASE=5000000. Set
# MODEL_ARGS_ROTARY_BASE before sourcing to change it.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 94
   --hidden-size 4096
   --ffn-hidden-size 12288
   --num-attention-heads 64
   --group-query-attention
   --num-query-groups 4
   --kv-channels 128
   --vocab-size 151936
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --position-embedding-type rope
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --rotary-percent 1.0
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --qk-layernorm
   --num-experts 128
   --moe-layer-freq "[1]*94"
   --moe-ffn-hidden-size 1536
   --moe-router-topk 8
   --moe-router-score-function softmax
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-token-drop-policy probs
   --moe-grouped-gemm
   --moe-permute-fusion
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
