#!/usr/bin/env bash
# shellcheck disable=SC2034  # the arrays are for the script that sources this
# zai-org/GLM-4.6: the same as glm4.5-355B-A32B.
# Generated from presets.yaml by tools/make_presets.py: edit that file, not this one.
# shellcheck source=./glm4.5-355B-A32B.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/glm4.5-355B-A32B.sh"
