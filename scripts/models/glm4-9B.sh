#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# zai-org/GLM-Z1-9B-0414, zai-org/GLM-4-9B-0414.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --spec slime_plugins.models.glm4 get_glm_spec
   --num-layers 40
   --hidden-size 4096
   --ffn-hidden-size 13696
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 2
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --add-qkv-bias
   --use-rotary-position-embeddings
   --rotary-base 10000
   --rotary-percent 0.5
   --rotary-interleaved
   --no-rope-fusion
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --post-self-attn-layernorm
   --post-mlp-layernorm
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
