#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# moonshotai/Moonlight-16B-A3B: the same as moonlight.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
# shellcheck source=./moonlight.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/moonlight.sh"
