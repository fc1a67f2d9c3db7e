#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen2.5-Math-1.5B. The rope base is that of the Math model; plain Qwen2.5-1.5B has 1000000.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 28
   --hidden-size 1536
   --ffn-hidden-size 8960
   --num-attention-heads 12
   --group-query-attention
   --num-query-groups 2
   --vocab-size 151936
   --swiglu
   --disable-bias-linear
   --add-qkv-bias
   --use-rotary-position-embeddings
   --rotary-base 10000
   --normalization RMSNorm
   --norm-epsilon 1e-6
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
