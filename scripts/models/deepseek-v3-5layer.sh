#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# The first 5 layers of deepseek-v3, for tests.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
# shellcheck source=./deepseek-v3.sh
MODEL_ARGS_NUM_LAYERS=5 source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
