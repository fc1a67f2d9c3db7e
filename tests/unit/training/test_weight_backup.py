"""Weights that take turns with a copy: which ones compute, and how much memory waits in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from slime.backends.training import offload
from slime.backends.training.offload import DeviceMemory, HostPool, WeightBackup
from slime.utils import accelerator
from slime.utils.accelerator import CPUAccelerator, CUDAAccelerator
from slime.utils.errors import ConfigError


def test_a_copy_computes_inside_the_block_and_the_own_weights_afterwards_also_after_an_error() -> None:
    weights = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(5).bfloat16())]
    reference = [weight.detach().clone() for weight in weights]
    backup = WeightBackup(weights)
    for _ in range(2):
        with torch.no_grad():
            for weight in weights:
                weight.add_(1.0)
        own = [weight.detach().clone() for weight in weights]
        with backup.swapped_in():
            torch.testing.assert_close([weight.detach() for weight in weights], reference, rtol=0, atol=0)
        torch.testing.assert_close([weight.detach() for weight in weights], own, rtol=0, atol=0)
        with pytest.raises(KeyError), backup.swapped_in():
            {}["a pass that fails"]
        torch.testing.assert_close([weight.detach() for weight in weights], own, rtol=0, atol=0)
    backup.refresh()
    with torch.no_grad():
        weights[0].zero_()
    with backup.swapped_in():
        torch.testing.assert_close(weights[0].detach(), own[0], rtol=0, atol=0)


def test_several_copies_need_one_place_each_and_none_for_the_weights_they_replace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    empty = torch.empty

    def counted(*args: object, **values: object) -> torch.Tensor:
        tensor = empty(*args, **values)  # type: ignore[call-overload]
        made.append(weakref.ref(tensor))
        return tensor  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "empty", counted)
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(5)]
    copies = [WeightBackup(weights) for _ in range(3)]
    for copy in copies:
        with copy.swapped_in():
            assert sum(ref() is not None for ref in made) == 5 * (3 + 1)
        copy.refresh()
    assert sum(ref() is not None for ref in made) == 5 * 3


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of new host memory, as on a machine that pins it."""
    made: list[int] = []

    def block(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(offload, "_block", block)
    monkeypatch.setattr(offload, "_pool", HostPool())
    accelerator.set_accelerator(CUDAAccelerator())
    yield made
    accelerator.reset_accelerator()


def test_host_memory_is_made_once_for_all_copies_of_a_process(blocks: list[int]) -> None:
    weights = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(5).bfloat16())]
    backup = WeightBackup(weights)
    assert blocks == [48, 10]
    for _ in range(3):
        with backup.swapped_in():
            pass
    assert blocks == 2 * [48, 10], "the live weights have their own place"
    del backup
    gc.collect()
    with WeightBackup(weights).swapped_in():
        pass
    assert blocks == 3 * [48, 10], "a copy has new memory, but its live weights have that of the dropped copy"


def test_memory_that_was_pinned_ahead_is_that_of_the_first_offload(blocks: list[int]) -> None:
    parts = {"weights": [torch.zeros(6)], "gradients": [torch.zeros(6)], "optimizer": [torch.zeros(3)]}
    memory = DeviceMemory(lambda part: parts[part], lambda: None)
    accelerator.set_accelerator(CPUAccelerator())  # the device of these tensors
    memory.pin_ahead(num_moments=2)
    memory.offload(["gradients"])
    parts["optimizer"] += [torch.zeros(3), torch.zeros(3)]  # the moments of the first step
    memory.offload()
    assert blocks == [24, 12, 12, 12]


class Communicator:
    """The NCCL or gloo part of a process group. Writes down its calls, and whether the weights are there."""

    def __init__(self, kind: str, calls: list[tuple[str, int]], weights: torch.Tensor) -> None:
        self.kind, self.calls, self.weights = kind, calls, weights

    def name(self) -> str:
        return self.kind

    def suspend(self) -> None:
        self.calls.append(("suspend", self.weights.untyped_storage().nbytes()))

    def resume(self) -> None:
        self.calls.append(("resume", self.weights.untyped_storage().nbytes()))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """The process groups, which a test fills."""
    made: list[SimpleNamespace] = []
    monkeypatch.setattr(offload.c10d, "_world", SimpleNamespace(pg_map=made))
    return made


def group_of(parts: dict[str, Communicator]) -> SimpleNamespace:
    return SimpleNamespace(_device_types=list(parts), _get_backend=parts.__getitem__)


def test_communicators_give_their_memory_up_while_every_part_is_offloaded(
    groups: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    weights, calls = torch.zeros(6), []
    memory = DeviceMemory(lambda part: [weights] if part == "weights" else [], lambda: None)
    nccl, gloo = Communicator("nccl", calls, weights), Communicator("gloo", calls, weights)
    groups += [group_of({"cpu": gloo, "cuda": nccl}), group_of({"cpu": gloo, "cuda": gloo})]
    groups += [group_of({"cuda": Communicator("nccl", calls, weights)})]
    memory.take_communicators()
    groups += [group_of({"cuda": Communicator("nccl", calls, weights)})]  # of a weight sync to other devices
    memory.offload(["gradients", "optimizer"])
    assert calls == []
    for _ in range(2):  # a repeated verb changes nothing
        memory.offload()
    assert calls == 2 * [("suspend", 0)]
    for _ in range(2):
        memory.onload(["weights"])
    assert calls == 2 * [("suspend", 0)] + 2 * [("resume", 0)], "before the weights need the memory"
    memory.offload(["weights"])
    memory.onload()
    assert [name for name, _ in calls] == 2 * (2 * ["suspend"] + 2 * ["resume"])


def test_communicators_of_an_older_nccl_are_refused_and_gloo_has_none(
    groups: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    memory = DeviceMemory(lambda part: [], lambda: None)
    groups += [group_of({"cpu": Communicator("gloo", [], torch.zeros(1))})]
    memory.take_communicators()
    groups += [group_of({"cuda": Communicator("nccl", [], torch.zeros(1))})]
    with pytest.raises(ConfigError, match=r"needs NCCL 2\.29\.7 or later, and this is 2\.28\.9: drop it"):
        memory.take_communicators()


def test_torch_has_the_functions_for_the_memory_of_communicators() -> None:
    assert {"name", "resume", "suspend"} <= set(dir(torch._C._distributed_c10d.Backend))
    assert {"_device_types", "_get_backend"} <= set(dir(c10d.ProcessGroup))
    assert isinstance(c10d._world.pg_map, dict)
