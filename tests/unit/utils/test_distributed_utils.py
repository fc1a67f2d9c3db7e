"""The start of a trainer's process group on GPUs, with a device and collectives that only remember."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.utils import accelerator
from slime.utils.accelerator import Accelerator
from slime.utils.distributed_utils import init_default_group


class NotedDevice(Accelerator):
    """Is on the CPU and reports so to torch only."""

    name = "cuda"

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def set_device(self, index: Any) -> None:
        self._events.append(("device", index))

    def device(self, index: Any = None) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch):
    noted: list[Any] = []
    accelerator.set_accelerator(NotedDevice(noted))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: noted.append(("group", backend)))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: noted.append(("collective", str(tensor.device))))
    yield noted
    accelerator.reset_accelerator()


def test_every_process_of_torchrun_takes_its_own_device_before_it_meets_the_others(events, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    init_default_group("gloo", timeout_s=1.0)
    assert events == [("device", 3), ("group", "gloo")]


def test_nccl_learns_the_device_from_a_collective_before_anybody_waits_in_a_barrier(events, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    init_default_group("nccl", timeout_s=1.0)
    assert events == [("group", "nccl"), ("collective", "cpu")]
