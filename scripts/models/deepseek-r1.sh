#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# deepseek-ai/DeepSeek-R1: the same as deepseek-v3.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
# shellcheck source=./deepseek-v3.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
