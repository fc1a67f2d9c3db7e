"""The image: lint, and agreement with what goes into it. Building it needs a network and is left to its user."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_DOCKERFILE = _ROOT / "Dockerfile"


def test_the_linter_finds_nothing():
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, _DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_it_copies_is_there():
    copied = re.findall(r"^COPY (.+) \S+$", _DOCKERFILE.read_text(), re.MULTILINE)
    assert copied
    for word in " ".join(copied).split():
        assert (_ROOT / word).exists(), word


def test_its_cuda_is_the_one_that_the_engine_s_wheels_are_built_for():
    image = re.search(r"^ARG CUDA_IMAGE=nvidia/cuda:(\d+)\.", _DOCKERFILE.read_text(), re.MULTILINE)
    wheels = re.search(r"cuda-python>=(\d+)", "\n".join(requires("sglang") or []))
    assert image is not None
    assert wheels is not None
    assert image.group(1) == wheels.group(1)


def test_nothing_that_is_built_or_private_reaches_the_image():
    ignored = (_ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "outputs"} <= set(ignored)


def test_any_user_of_the_image_works_in_root_slime():
    text = _DOCKERFILE.read_text()
    assert "\nWORKDIR /root/slime\n" in text
    assert "chmod 1777 /root" in text, "/root is closed to the image's user otherwise"
