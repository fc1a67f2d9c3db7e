#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen3.5-0.8B.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
   --num-layers 24
   --hidden-size 1024
   --ffn-hidden-size 3584
   --num-attention-heads 8
   --group-query-attention
   --num-query-groups 2
   --kv-channels 256
   --vocab-size 248320
   --swiglu
   --disable-bias-linear
   --attention-output-gate
   --use-gated-attention
   --position-embedding-type rope
   --rotary-base 10000000
   --rotary-percent 0.25
   --normalization RMSNorm
   --norm-epsilon 1e-6
   --qk-layernorm
   --apply-layernorm-1p
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
