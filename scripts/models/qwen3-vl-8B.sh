#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen3-VL-8B-Instruct, Qwen/Qwen3-VL-8B-Thinking. The language model; --multimodal-keys adds the vision
# tower.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
# shellcheck source=./qwen3-8B.sh
MODEL_ARGS_ROTARY_BASE=5000000 source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3-8B.sh"
