#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# meta-llama/Llama-3.1-8B-Instruct.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --num-layers 32
   --hidden-size 4096
   --ffn-hidden-size 14336
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --vocab-size 128256
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --use-rotary-position-embeddings
   --rotary-base 500000
   --use-rope-scaling
   --rotary-scaling-factor 8.0
   --max-position-embeddings 131072
   --normalization RMSNorm
   --norm-epsilon 1e-5
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
