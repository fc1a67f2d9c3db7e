#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen3.5-35B-A3B, Qwen/Qwen3.6-35B-A3B. The text tower only.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
MODEL_ARGS=(
   --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
   --num-layers 40
   --hidden-size 2048
   --ffn-hidden-size 512
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 2
   --kv-channels 256
   --vocab-size 248320
   --untie-embeddings-and-output-weights
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
   --num-experts 256
   --moe-layer-freq "[1]*40"
   --moe-ffn-hidden-size 512
   --moe-router-topk 8
   --moe-shared-expert-intermediate-size 512
   --moe-shared-expert-gate
   --moe-router-score-function softmax
   --moe-aux-loss-coeff 0
   --moe-router-dtype fp32
   --moe-token-dispatcher-type alltoall
   --moe-token-drop-policy probs
   --moe-grouped-gemm
   --moe-permute-fusion
)

# shellcheck source=../lib/checkpoint.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/checkpoint.sh"
