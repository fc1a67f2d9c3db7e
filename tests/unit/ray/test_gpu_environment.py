"""Environment variables of the processes of a run on machines with GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.ray.run import cluster
from slime.ray.run.cluster import allocator_env, nccl_as_engines, worker_env
from slime.utils import accelerator
from slime.utils.accelerator import CUDAAccelerator
from slime.utils.errors import ConfigError

_AGREED = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "is_embedded", lambda: False)
    for name in (*_AGREED, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    accelerator.set_accelerator(CUDAAccelerator())
    yield
    accelerator.reset_accelerator()


def test_trainer_and_engines_are_told_the_same_about_nccl():
    assert [worker_env()[name] for name in _AGREED] == ["0", "0"], "what an engine would choose for itself"


def test_what_the_user_says_about_nccl_reaches_every_process(monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert [worker_env()[name] for name in _AGREED] == ["1", "0"]


def test_the_trainer_follows_engines_that_overrule_the_environment():
    assert nccl_as_engines(["--enable-symm-mem"]) == dict.fromkeys(_AGREED, "1")
    assert nccl_as_engines(["--tp-size", "2"]) == {}


def test_a_driver_without_a_gpu_does_not_take_a_cluster_of_gpus_for_cpus(monkeypatch):
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    resources = {"GPU": 8.0, "accelerator_type:H100": 1.0}
    cluster.check_devices(resources)  # this machine has GPUs as well
    accelerator.set_accelerator(accelerator.CPUAccelerator())
    with pytest.raises(ConfigError, match="SLIME_ACCELERATOR=cuda"):
        cluster.check_devices(resources)
    cluster.check_devices({"GPU": 8.0})  # announced by a cluster without any
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    cluster.check_devices(resources)


@pytest.mark.parametrize(
    ("driver", "given", "expected"),
    [
        ({}, {}, {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:64"}),
        (
            {},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,pinned_max_cached_size_mb:64"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"},
            {},
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512,pinned_max_cached_size_mb:64"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"},
            {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:8"},
            {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:8"},
        ),
        (  # alone it lets torch hand out a block that is too small
            {},
            {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:16"},
            {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:16,pinned_max_cached_size_mb:16"},
        ),
    ],
)
def test_large_pinned_blocks_of_trainers_have_the_size_that_is_asked_for(
    driver: dict[str, str], given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    for name, value in driver.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster, "_torch_version", lambda: (2, 14))
    assert allocator_env(given) == expected
    monkeypatch.setattr(cluster, "_torch_version", lambda: (2, 12))
    assert allocator_env(given) == {}


def test_this_torch_has_the_setting_of_pinned_memory():
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    assert "pinned_max_cached_size" in header.read_text(encoding="utf-8")


def test_cpu_trainers_have_no_settings_of_an_allocator():
    accelerator.set_accelerator(accelerator.CPUAccelerator())
    assert allocator_env({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}) == {}
