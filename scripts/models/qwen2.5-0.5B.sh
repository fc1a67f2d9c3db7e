#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen2.5-0.5B-Instruct.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 24
   --hidden-size 896
   --ffn-hidden-size 4864
   --num-attention-heads 14
   --group-query-attention
   --num-query-groups 2
   --vocab-size 151936
   --swiglu
   --disable-bias-linear
   --add-qkv-bias
   --use-rotary-position-embeddings
   --rotary-base 1000000
   --normalization RMSNorm
   --norm-epsilon 1e-6
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
