#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen3.5-35B-A3B. qwen3.5-35B-A3B with the vision tower.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
# shellcheck source=./qwen3.5-35B-A3B.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3.5-35B-A3B.sh"
for i in "${!MODEL_ARGS[@]}"; do
   if [[ "${MODEL_ARGS[i]}" == --spec ]]; then
      MODEL_ARGS[i + 1]=slime_plugins.models.qwen3_5_vl
      MODEL_ARGS[i + 2]=get_qwen3_5_vl_model_provider
   fi
done
unset i
