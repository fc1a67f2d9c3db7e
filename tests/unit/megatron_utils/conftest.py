"""Megatron for the tests of this folder: repaired before any import, and the groups of a single rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from slime.backends.megatron_utils.patches import install
from tests.unit.megatron_utils.tiny_trainer import single_rank

# The repairs must run before the first import of megatron.core. Here they run before pytest imports any test module, so
# that a single test passes in any order.
install()


@pytest.fixture(scope="module")
def trainer_rank() -> Iterator[None]:
    """This process as the only rank of trainers, which make the groups themselves."""
    with single_rank():
        yield


@pytest.fixture(scope="module")
def megatron_groups(trainer_rank: None) -> None:
    """The groups of a single rank, for models without a trainer."""
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    dist.init_process_group("gloo")
    mpu.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
