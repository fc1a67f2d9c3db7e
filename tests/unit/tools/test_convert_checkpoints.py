"""The conversion tools as a user runs them: one process, no torchrun, weights there and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.programs import run_program
from tests.unit.megatron_utils.tiny_families import saved_tensors
from tests.unit.megatron_utils.tiny_trainer import make_hf_model

_ROOT = Path(__file__).parents[3]


def _run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_program(f"tools/{tool}", *arguments, env=_environment())


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("convert") / "hf"
    make_hf_model("qwen3", path)
    return path


def test_a_checkpoint_converted_there_and_back_is_the_same_bit_for_bit(hf: Path, tmp_path: Path) -> None:
    flags = ["--num-layers", 2, "--hidden-size", 32, "--swiglu", "--disable-bias-linear", "--qk-layernorm"]
    there = _run("convert_hf_to_torch_dist.py", *flags, "--hf-checkpoint", hf, "--save", tmp_path / "dist")
    assert there.returncode == 0, there.stderr
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text() == "release"
    back = _run(
        "convert_torch_dist_to_hf.py",
        *("--input-dir", tmp_path / "dist" / "release"),
        *("--output-dir", tmp_path / "back"),
        *("--origin-hf-dir", hf),
        *("--chunk-size", 20_000),
    )
    assert back.returncode == 0, back.stderr
    weight_map = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 1
    from slime.backends.training.hf_files import TensorReader

    reader, saved = TensorReader(tmp_path / "back", ""), saved_tensors(hf)
    assert reader.names == saved.keys()
    for name, value in saved.items():
        assert reader.get(name).dtype == torch.float32, "the source's precision is kept"
        assert torch.equal(reader.get(name), value)
    parallel = _run(
        "convert_torch_dist_to_hf_parallel.py",
        *("--input-dir", tmp_path / "dist" / "release"),
        *("--output-dir", tmp_path / "parallel"),
        *("--origin-hf-dir", hf),
        *("--chunk-size", 20_000),
        *("--save-max-workers", 3),
    )
    assert parallel.returncode == 0, parallel.stderr
    written = {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "parallel").iterdir()} == written
    again = _run("convert_hf_to_torch_dist.py", "--hf-checkpoint", hf, "--save", tmp_path / "dist")
    assert again.returncode == 2
    assert "already holds release/" in again.stderr


_THREADS_AT_EXIT = """
import atexit, pathlib, runpy, sys
sys.argv = sys.argv[1:]
tasks = pathlib.Path("/proc/self/task")
atexit.register(lambda: print(sorted((task / "comm").read_text().strip() for task in tasks.iterdir())))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_tool_ends_the_threads_of_its_process_groups(hf: Path, tmp_path: Path) -> None:
    """A thread of gloo that releases a tensor during the interpreter's shutdown aborts the process, rarely."""
    tool = ["tools/convert_hf_to_torch_dist.py", "--hf-checkpoint", hf, "--save", tmp_path / "dist"]
    command = [sys.executable, "-c", _THREADS_AT_EXIT, *map(str, tool)]
    done = subprocess.run(command, cwd=_ROOT, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "gloo" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "tool",
    ["convert_hf_to_torch_dist.py", "convert_torch_dist_to_hf.py", "convert_torch_dist_to_hf_parallel.py"],
)
def test_help_says_how_to_use_the_tool(tool: str) -> None:
    result = _run(tool, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: {tool} [-h] ")
    assert "train.py" not in result.stdout
    assert f"python tools/{tool}" in result.stdout
    assert "--num-layers" in result.stdout


def test_wrong_model_flags_are_refused_before_anything_is_built(hf: Path, tmp_path: Path) -> None:
    result = _run("convert_hf_to_torch_dist.py", "--num-layers", 3, "--hf-checkpoint", hf, "--save", tmp_path / "dist")
    assert result.returncode == 2
    assert "--num-layers 3" in result.stderr
    assert "Traceback" not in result.stderr
