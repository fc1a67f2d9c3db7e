#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# Qwen/Qwen3-4B-Instruct-2507.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
# shellcheck source=./qwen3-4B.sh
MODEL_ARGS_ROTARY_BASE=5000000 source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3-4B.sh"
