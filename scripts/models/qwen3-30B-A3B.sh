#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen3-30B-A3B, Qwen/Qwen3-30B-A3B-FP8. The 2507 and Coder releases have another rope base: set
# MODEL_ARGS_ROTARY_BASE. Set MODEL_ARGS_ROTARY_BASE before sourcing to change it.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 48
   --hidden-size 2048
   --ffn-hidden-size 6144
   --num-attention-heads 32
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
   --moe-layer-freq "[1]*48"
   --moe-ffn-hidden-size 768
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
