"""The image: lint, and agreement with what goes into it. Building it needs a network and is left to its user."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from slime.doctor.machine_checks import _GOOD_OPEN_FILES
from tests.doc_commands import commands_of_page
from tests.unit.scripts.dry_run import dry_run

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
    assert "chmod 1777 /root " in text, "/root is closed to the image's user otherwise"


def _environment() -> dict[str, str]:
    lines = _DOCKERFILE.read_text().replace("\\\n", " ").splitlines()
    words = [word for line in lines if line.startswith("ENV ") for word in line.removeprefix("ENV ").split()]
    return dict(word.split("=", 1) for word in words)


def test_the_scripts_of_the_image_use_the_folders_that_the_page_mounts():
    environment = {name: value for name, value in _environment().items() if name.endswith("_DIR")}
    [run] = [found.text for found in commands_of_page(_ROOT / "docs" / "docker.md") if " slime bash" in found.text]
    mounted = re.findall(r"-v \S*?:(/[^\s\"]+)", run)
    made = dry_run("run-qwen3-4B.sh", env=environment)
    for flag in ("--hf-checkpoint", "--prompt-data", "--save"):
        assert any(made.value(flag).startswith(f"{folder}/") for folder in mounted), (flag, made.value(flag), mounted)
    caches = [value for name, value in environment.items() if name.endswith("_CACHE_DIR")]
    assert len(caches) == 2
    assert all(cache.startswith(tuple(mounted)) for cache in caches)


def test_the_page_passes_the_limits_that_the_doctor_wants():
    words = (_ROOT / "docs" / "docker.md").read_text()
    for option in ("--network=host", "--device=/dev/infiniband", "--cap-add=IPC_LOCK", "memlock=-1", "--shm-size="):
        assert option in words, option
    assert "ibverbs-providers" in _DOCKERFILE.read_text(), "NCCL finds no adapter without it"
    assert int(re.search(r"nofile=(\d+)", words)[1]) >= _GOOD_OPEN_FILES


def test_extra_kernels_have_the_versions_that_megatron_core_supports():
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ours = {found.name: found for name in ("gpu", "te") for found in map(Requirement, extras[name])}
    theirs = {found.name: found for found in map(Requirement, requires("megatron-core") or [])}
    for name, requirement in ours.items():
        assert requirement.specifier == theirs[name].specifier, name
        assert requirement.extras == theirs[name].extras, name
    assert set(ours) == {"flash-linear-attention", "transformer-engine"}
    assert "'.[te]'" in _DOCKERFILE.read_text()
    [command] = [
        line for line in (_ROOT / "docs" / "docker.md").read_text().splitlines() if "-r requirements.txt" in line
    ]
    assert f"'{ours['flash-linear-attention']}'" in command
