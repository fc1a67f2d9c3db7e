"""One gloo rank of the whitening test: rank, world size, rendezvous file, output file."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from slime.algorithms.credit import normalize


def main(rank: int, world_size: int, rendezvous: str, output: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    rows, masks = torch.load(f"{rendezvous}.inputs", weights_only=True)[rank]
    torch.save(normalize(rows, masks, dist.group.WORLD), output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
