#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# meta-llama/Llama-3.2-3B-Instruct: the same as llama3.2-3B-Instruct.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
# shellcheck source=./llama3.2-3B-Instruct.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/llama3.2-3B-Instruct.sh"
