"""Two gloo processes that run a function of this file: ``run_ranks("whiten", tmp_path, inputs)``."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.credit import normalize
from slime.algorithms.logprobs import SamplingMask, log_probs_and_entropy

SIZE = 2


def run_ranks(function: str, directory: Path, inputs: Any) -> list[Any]:
    """The result of ``function(rank, inputs)`` on each rank. ``directory`` is empty, or does not exist."""
    directory.mkdir(exist_ok=True)
    torch.save(inputs, directory / "inputs")
    fork = multiprocessing.get_context("fork")  # of this process, which has imported torch
    ranks = [fork.Process(target=_main, args=(function, directory, rank)) for rank in range(SIZE)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert [process.exitcode for process in ranks] == [0] * SIZE
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(SIZE)]


def whiten(rank: int, inputs: Any) -> list[torch.Tensor]:
    rows, masks = inputs[rank]
    return normalize(rows, masks, dist.group.WORLD)


def log_probs(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Each rank holds half of the vocabulary."""
    return [
        computed(case, case["logits"].chunk(SIZE, dim=1)[rank], keep=kept(case, rank), group=dist.group.WORLD)
        for case in cases
    ]


def computed(case: dict[str, Any], logits: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Log-probs, entropy and the gradient of their weighted sum by ``logits``."""
    leaf = logits.clone().requires_grad_()
    settings = {name: case[name] for name in ("vocab_size", "temperature", "chunk_size")}
    found, entropy = log_probs_and_entropy(leaf, case["targets"], with_entropy=True, **settings, **kwargs)
    (found @ case["w_lp"] + entropy @ case["w_h"]).backward()
    return {"log_probs": found.detach(), "entropy": entropy.detach(), "grad": leaf.grad}


def kept(case: dict[str, Any], rank: int) -> torch.Tensor | SamplingMask | None:
    """The shard of a dense mask, or the sets of all ranks."""
    if "keep" not in case:
        return None
    if "offsets" in case:
        return SamplingMask.of([case["keep"]], [case["offsets"]])
    return case["keep"].chunk(SIZE, dim=1)[rank]


def _main(function: str, directory: Path, rank: int) -> None:
    torch.set_num_threads(1)  # the threads of OpenMP are not in a fork
    where, limit = f"file://{directory / 'rendezvous'}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE, timeout=limit)
    torch.save(globals()[function](rank, torch.load(directory / "inputs", weights_only=True)), directory / f"{rank}.pt")
    dist.destroy_process_group()
