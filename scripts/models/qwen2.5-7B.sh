#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen2.5-7B, Qwen/Qwen2.5-7B-Instruct.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 28
   --hidden-size 3584
   --ffn-hidden-size 18944
   --num-attention-heads 28
   --group-query-attention
   --num-query-groups 4
   --vocab-size 152064
   --untie-embeddings-and-output-weights
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
