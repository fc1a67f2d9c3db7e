#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# XiaomiMiMo/MiMo-7B-RL.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 36
   --hidden-size 4096
   --ffn-hidden-size 11008
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --vocab-size 151680
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --add-qkv-bias
   --use-rotary-position-embeddings
   --rotary-base 640000
   --max-position-embeddings 32768
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --mtp-num-layers 1
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
