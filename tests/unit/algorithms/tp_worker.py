"""One rank of a two-process tensor-parallel group for test_logprobs: argv = rank, size, rendezvous, output file."""

from __future__ import annotations

import datetime
import sys

import torch
import torch.distributed as dist

from slime.algorithms.logprobs import log_probs_and_entropy
from slime.algorithms.sampling_mask import SamplingMask


def main(rank: int, size: int, rendezvous: str, output: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    cases = torch.load(rendezvous + ".cases", weights_only=True)
    results = []
    for case in cases:
        shard = case["logits"].chunk(size, dim=1)[rank].clone().requires_grad_()
        log_probs, entropy = log_probs_and_entropy(
            shard,
            case["targets"],
            group=dist.group.WORLD,
            vocab_size=case["vocab_size"],
            temperature=case["temperature"],
            chunk_size=case["chunk_size"],
            with_entropy=True,
            keep=kept(case, rank, size),
        )
        (log_probs @ case["w_lp"] + entropy @ case["w_h"]).backward()
        results.append({"log_probs": log_probs.detach(), "entropy": entropy.detach(), "grad": shard.grad})
    torch.save(results, output)
    dist.destroy_process_group()


def kept(case: dict, rank: int, size: int) -> torch.Tensor | SamplingMask | None:
    """The shard of a dense mask, or the sets of all ranks."""
    if "keep" not in case:
        return None
    if "offsets" in case:
        return SamplingMask.of([case["keep"]], [case["offsets"]])
    return case["keep"].chunk(size, dim=1)[rank]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
