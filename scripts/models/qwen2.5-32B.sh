#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen2.5-32B. The epsilon is that of the base model; the Instruct model has 1e-6.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 64
   --hidden-size 5120
   --ffn-hidden-size 27648
   --num-attention-heads 40
   --group-query-attention
   --num-query-groups 8
   --vocab-size 152064
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --add-qkv-bias
   --use-rotary-position-embeddings
   --rotary-base 1000000
   --normalization RMSNorm
   --norm-epsilon 1e-5
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
