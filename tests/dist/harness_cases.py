"""Functions that the ranks run in the tests of the harness itself."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def add_ranks(rank: int, world_size: int, value: float) -> torch.Tensor:
    dist.init_process_group("gloo")
    total = torch.tensor([value + rank])
    dist.all_reduce(total)
    return total


def fail_on_one(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo")
    if rank == 1:
        raise ValueError("only rank one")
    dist.barrier()


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)
