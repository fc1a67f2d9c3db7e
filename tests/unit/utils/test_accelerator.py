"""What the device is taken to be, from the files of drivers, the environment and the build of torch."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from slime.utils import accelerator
from slime.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def _ask_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLIME_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def found(monkeypatch: pytest.MonkeyPatch, driver: Path, torch: str) -> str:
    monkeypatch.setattr(accelerator, "_DRIVERS", (driver.parent / "another", driver))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: torch)
    return accelerator.current.__wrapped__().name


@pytest.mark.parametrize("torch", ["2.13.0+cu130", "2.13.0+rocm7.2", "2.13.0"])
def test_a_driver_and_a_torch_built_for_it_make_cuda_of_nvidia_and_amd_alike(
    torch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver").touch()
    assert found(monkeypatch, tmp_path / "driver", torch) == "cuda"
    assert found(monkeypatch, tmp_path / "none", torch) == "cpu"
    assert found(monkeypatch, tmp_path / "driver", "2.13.0+cpu") == "cpu"


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
@pytest.mark.parametrize(("value", "device"), [("", "cpu"), ("-1", "cpu"), ("0,1", "cuda")])
def test_a_device_that_is_hidden_is_none(
    name: str, value: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver").touch()
    monkeypatch.setenv(name, value)
    assert found(monkeypatch, tmp_path / "driver", "2.13.0+cu130") == device


def test_the_environment_decides_and_a_device_that_does_not_exist_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIME_ACCELERATOR", "cuda")
    assert found(monkeypatch, tmp_path / "none", "2.13.0+cpu") == "cuda"
    monkeypatch.setenv("SLIME_ACCELERATOR", "tpu")
    with pytest.raises(ConfigError, match="SLIME_ACCELERATOR='tpu'"):
        accelerator.current.__wrapped__()
