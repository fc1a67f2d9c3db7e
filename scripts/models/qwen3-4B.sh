#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen3-4B, Qwen/Qwen3-4B-Base, Qwen/Qwen3-4B-FP8. Set MODEL_ARGS_ROTARY_BASE before sourcing to change it.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 36
   --hidden-size 2560
   --ffn-hidden-size 9728
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 151936
   --swiglu
   --disable-bias-linear
   --use-rotary-position-embeddings
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --qk-layernorm
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
