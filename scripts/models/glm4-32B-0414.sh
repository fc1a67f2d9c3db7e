#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# zai-org/GLM-4-32B-0414, zai-org/GLM-Z1-32B-0414.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --spec slime_plugins.models.glm4 get_glm_spec
   --num-layers 61
   --hidden-size 6144
   --ffn-hidden-size 23040
   --num-attention-heads 48
   --group-query-attention
   --num-query-groups 2
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --swiglu
   --disable-bias-linear
   --use-rotary-position-embeddings
   --rotary-base 10000
   --rotary-percent 0.5
   --rotary-interleaved
   --no-rope-fusion
   --max-position-embeddings 32768
   --seq-length 32768
   --normalization RMSNorm
   --norm-epsilon 1e-5
   --post-self-attn-layernorm
   --post-mlp-layernorm
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
