#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# meta-llama/Meta-Llama-3-70B, meta-llama/Meta-Llama-3-70B-Instruct.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 80
   --hidden-size 8192
   --ffn-hidden-size 28672
   --num-attention-heads 64
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 128256
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --use-rotary-position-embeddings
   --rotary-base 500000
   --max-position-embeddings 8192
   --normalization RMSNorm
   --norm-epsilon 1e-5
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
