"""The memory of an engine on a CPU goes back to the system when it is released."""

from __future__ import annotations

import psutil
import pytest
import torch

from slime.backends.sglang_utils.cpu_platform.hooks import _create_memory_saver
from slime.backends.sglang_utils.cpu_platform.memory_saver import CpuMemorySaver

MIB = 1024**2


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> CpuMemorySaver:
    monkeypatch.setattr(CpuMemorySaver, "_blocks", type(CpuMemorySaver._blocks)(dict))
    return CpuMemorySaver()


def resident_mib() -> float:
    return psutil.Process().memory_info().rss / MIB


def test_a_released_region_is_returned_and_reads_as_zeros(saver):
    with saver.region("kv_cache"):
        cache = [torch.zeros(16 * MIB, dtype=torch.uint8) for _ in range(4)]
    for part in cache:
        part.fill_(7)
    outside = torch.full((16 * MIB,), 7, dtype=torch.uint8)
    before = resident_mib()
    CpuMemorySaver().pause("kv_cache")  # another adapter of the same process, as in SGLang
    assert resident_mib() < before - 60
    assert [int(part[MIB:-MIB].max()) for part in cache] == [0] * 4
    assert int(outside.min()) == 7, "only the region is released"
    saver.resume("kv_cache")
    cache[0].fill_(9)
    assert int(cache[0].min()) == 9


def test_regions_are_released_one_by_one(saver):
    with saver.region("weights"):
        weight = torch.nn.Parameter(torch.ones(4 * MIB))
    with saver.region("kv_cache"):
        cache = torch.ones(4 * MIB)
    saver.pause("kv_cache")
    assert float(cache[MIB]) == 0
    assert float(weight.detach().min()) == 1
    saver.pause("weights")
    assert float(weight.detach()[MIB]) == 0


def test_a_region_with_a_backup_keeps_its_content(saver):
    with saver.region("weights", enable_cpu_backup=True):
        weight = torch.ones(4 * MIB)
    saver.pause("weights")
    assert float(weight.min()) == 1


def test_memory_that_was_freed_and_belongs_to_somebody_else_now_is_left_alone(saver):
    with saver.region("weights"):
        temporary = torch.ones(MIB)
        address = temporary.data_ptr()
    del temporary
    others = [torch.ones(MIB) for _ in range(8)]
    saver.pause("weights")
    assert all(float(other.min()) == 1 for other in others), f"one of them may stand at {address:#x}"


def test_without_the_flag_sglang_decides(saver):
    assert _create_memory_saver(lambda enable: ("sglang", enable), False) == ("sglang", False)
