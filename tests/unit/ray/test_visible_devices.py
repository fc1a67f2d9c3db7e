"""Ray's processes must see every device of their node: slime says which one is whose."""

from __future__ import annotations

import pytest
from ray._private.accelerators import amd_gpu, nvidia_gpu

from slime.ray.cluster import NOSET_VISIBLE_DEVICES


@pytest.mark.parametrize(
    "variable",
    [nvidia_gpu.NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR, amd_gpu.NOSET_HIP_VISIBLE_DEVICES_ENV_VAR],
)
def test_the_variable_that_this_ray_reads_for_a_vendor_is_set(variable: str) -> None:
    assert NOSET_VISIBLE_DEVICES[variable] == "1"
