"""The detected device, from the files of drivers, the environment and the build of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime.utils import accelerator
from slime.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def _ask_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLIME_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def found(monkeypatch: pytest.MonkeyPatch, driver: Path, *libraries: str) -> str:
    """``libraries``: of torch, besides those that every build has."""
    monkeypatch.setattr(accelerator, "_DRIVERS", (driver.parent / "another", driver))
    folder = driver.parent / "-".join(["torch", *libraries])
    folder.mkdir(exist_ok=True)
    for name in ("libtorch_cpu.so", *libraries):
        (folder / name).touch()
    monkeypatch.setattr(accelerator, "_torch_library", lambda: folder)
    return accelerator.current.__wrapped__().name


@pytest.mark.parametrize("library", ["libtorch_cuda.so", "libtorch_hip.so"])
def test_a_driver_and_a_torch_built_for_it_make_cuda_of_nvidia_and_amd_alike(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver").touch()
    assert found(monkeypatch, tmp_path / "driver", library) == "cuda"
    assert found(monkeypatch, tmp_path / "none", library) == "cpu"
    assert found(monkeypatch, tmp_path / "driver") == "cpu"


def test_the_libraries_of_torch_are_found_without_importing_it() -> None:
    code = "import sys; from slime.utils import accelerator as a; print(a._torch_library(), 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == [str(Path(torch.__file__).parent / "lib"), "False"]
    assert (Path(printed.split()[0]) / "libtorch_cpu.so").is_file()


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
@pytest.mark.parametrize(("value", "device"), [("", "cpu"), ("-1", "cpu"), ("0,1", "cuda")])
def test_a_device_that_is_hidden_is_none(
    name: str, value: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver").touch()
    monkeypatch.setenv(name, value)
    assert found(monkeypatch, tmp_path / "driver", "libtorch_cuda.so") == device


def test_the_environment_decides_and_a_device_that_does_not_exist_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIME_ACCELERATOR", "cuda")
    assert found(monkeypatch, tmp_path / "none") == "cuda"
    monkeypatch.setenv("SLIME_ACCELERATOR", "tpu")
    with pytest.raises(ConfigError, match="SLIME_ACCELERATOR='tpu'"):
        accelerator.current.__wrapped__()
