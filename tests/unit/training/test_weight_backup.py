"""Weights that take turns with a copy: which ones compute, and how much memory waits in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from slime.backends.training import offload
from slime.backends.training.offload import DeviceMemory, HostPool, WeightBackup
from slime.utils import accelerator
from slime.utils.accelerator import CPUAccelerator, CUDAAccelerator


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
