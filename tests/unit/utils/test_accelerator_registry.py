"""Kinds of accelerator that plugins bring, and the verbs that tools and plugins call."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from slime.utils import accelerator
from slime.utils.accelerator import Accelerator, CPUAccelerator, CUDAAccelerator
from slime.utils.errors import ConfigError


class Abacus(Accelerator):
    """A device of a plugin's."""

    name = "abacus"
    communication_backends = ("beads", "gloo")
    visible_devices_env_key = "ABACUS_VISIBLE"


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    monkeypatch.setattr(accelerator, "_kinds", dict(accelerator._kinds))
    accelerator.reset_accelerator()
    yield
    accelerator.reset_accelerator()


def test_a_registered_kind_is_taken_by_priority_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator.register_accelerator("abacus", Abacus, lambda: False, priority=1000)
    assert not isinstance(accelerator.get_accelerator(), Abacus)
    accelerator.register_accelerator("abacus", Abacus, lambda: True, priority=1000)
    assert isinstance(accelerator.get_accelerator(), Abacus)
    assert accelerator.current() is accelerator.get_accelerator() is accelerator.initialize_accelerator()
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    accelerator.reset_accelerator()
    assert accelerator.current().is_cpu
    monkeypatch.setenv("SLIME_ACCELERATOR", "tpu")
    accelerator.reset_accelerator()
    with pytest.raises(ConfigError, match="must be one of cpu, cuda, musa, abacus"):
        accelerator.current()


def test_the_one_that_is_set_beats_everything_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    before = type(accelerator.current())
    monkeypatch.setenv("SLIME_ACCELERATOR", before().name)
    abacus = Abacus()
    accelerator.set_accelerator(abacus)
    assert accelerator.current() is abacus
    assert accelerator.visible_devices_env_key() == "ABACUS_VISIBLE"
    accelerator.reset_accelerator()
    assert type(accelerator.current()) is before


@pytest.mark.parametrize(
    ("device", "default", "backend"),
    [
        (CPUAccelerator(), "nccl", "gloo"),
        (CUDAAccelerator(), "nccl", "nccl"),
        (CUDAAccelerator(), "gloo", "gloo"),
        (Abacus(), "nccl", "beads"),
    ],
)
def test_a_backend_that_reaches_the_device_stays_and_another_is_replaced(
    device: Accelerator, default: str, backend: str
) -> None:
    accelerator.set_accelerator(device)
    assert accelerator.process_group_backend(default) == accelerator.weight_update_backend(default) == backend


def test_backends_of_the_registration_replace_those_of_the_class() -> None:
    accelerator.register_accelerator("abacus", Abacus, priority=1000, communication_backends=("strings",))
    assert accelerator.process_group_backend() == "strings"


def test_a_device_of_the_host_is_found_among_those_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator.set_accelerator(CUDAAccelerator())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert accelerator.resolve_visible_device_id("3") == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert [accelerator.resolve_visible_device_id(name) for name in ("6", 6, 6.0)] == [1, 1, 1]
    with pytest.raises(RuntimeError, match="device 5 is not visible to this process: CUDA_VISIBLE_DEVICES=4, 6"):
        accelerator.resolve_visible_device_id(5)


def test_without_a_device_every_verb_is_harmless() -> None:
    accelerator.set_accelerator(CPUAccelerator())
    accelerator.set_device(3)
    accelerator.synchronize()
    accelerator.empty_cache()
    assert (accelerator.current_device(), accelerator.device_name(), accelerator.memory_allocated()) == (
        "cpu",
        "cpu",
        0,
    )
    assert accelerator.device() == torch.device("cpu")
    assert accelerator.distributed_device_id() is None


def test_a_device_of_moore_threads_is_noticed_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not accelerator.is_musa_available()
    monkeypatch.setenv("SLIME_ACCELERATOR", "musa")
    accelerator.reset_accelerator()
    with pytest.raises(ConfigError, match="SLIME_ACCELERATOR=musa is not supported yet"):
        accelerator.current()


def test_asking_for_the_device_imports_no_torch() -> None:
    script = "import sys; from slime.utils import accelerator; accelerator.current(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
