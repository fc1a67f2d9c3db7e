"""Tokens per second of one engine with drafts from history, epoch by epoch, and whether drafts change a token.

    python benchmarks/drafts.py

A real server on a CPU, with the demo's model with random weights and deterministic inference. Every epoch has the same
prompts. Epochs 0 to 2 have the same seeds, as those of a run with deterministic inference and nearly the same weights:
the first one has no history, and the drafts of the others are right. Epoch 3 has other seeds, so nearly all drafts are
wrong. Then another engine generates epoch 1: after it has got the responses of epoch 0, as a run sends them
(``slime/rollout/prompt_history.py``). Prints tokens per second of the clock and of the scheduler's processor time,
which depends less on other work of the machine, and tokens per verification.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.one_engine import one_engine
from slime.rollout.prompt_history import SEPARATOR
from tools.make_tiny_task import make_tiny_task

_SEEDS = (0, 0, 0, 1000)
_FLAGS = ("--enable-deterministic-inference", "--speculative-algorithm", "NGRAM")
_WARM_UP = [[1, 2, 3]] * 8


async def epoch(url: str, prompts: list[list[int]], seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Answers to ``--samples`` requests for each prompt."""
    limits = httpx.Limits(max_connections=options.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits, trust_env=False) as client:

        async def one(prompt: list[int], number: int) -> dict[str, Any]:
            sampling = {"max_new_tokens": options.new_tokens, "ignore_eos": True, "sampling_seed": seed + number}
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            return dict((await client.post("/generate", json=body)).raise_for_status().json())

        return await asyncio.gather(*(one(prompt, i) for i in range(options.samples) for prompt in prompts))


def scheduler_s(port: int) -> float:
    """Processor time of the scheduler of the server at ``port``: of its processes the one that computes."""
    listening = psutil.net_connections("tcp")
    pid = next(one.pid for one in listening if one.laddr and one.laddr.port == port and one.status == "LISTEN")
    return max(sum(child.cpu_times()[:2]) for child in psutil.Process(pid).children(recursive=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    generator = random.Random(0)
    # Ids below 20 exist in the vocabulary of every tiny model.
    prompts = [[generator.randrange(20) for _ in range(32)] for _ in range(options.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        task = make_tiny_task(Path(folder) / "task")
        first: list[list[int]] = []

        def measure(name: str, url: str, seed: int) -> None:
            port = httpx.URL(url).port
            assert port is not None
            before, began = scheduler_s(port), time.perf_counter()
            answers = asyncio.run(epoch(url, prompts, seed, options))
            seconds, processor_s = time.perf_counter() - began, scheduler_s(port) - before
            tokens = [answer["output_ids"] for answer in answers]
            first[:] = first or tokens
            count, steps = sum(map(len, tokens)), sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
            same = sum(one == other for one, other in zip(tokens, first, strict=True))
            print(
                f"{name}, seed {seed}: {count / seconds:6.0f} tokens/s, {count / processor_s:6.0f} per second of the "
                f"scheduler, {count / steps:.2f} per verification, {same} of {len(tokens)} responses as in epoch 0",
                flush=True,
            )

        with one_engine(Path(folder), task.model, *_FLAGS) as engine:
            asyncio.run(epoch(engine.url, _WARM_UP, 0, options))
            for number, seed in enumerate(_SEEDS):
                measure(f"epoch {number}", engine.url, seed)
        with one_engine(Path(folder) / "other", task.model, *_FLAGS) as engine:
            asyncio.run(epoch(engine.url, _WARM_UP, 0, options))
            # what the rollout manager sends
            pairs = zip(prompts * options.samples, first, strict=True)
            chunks = [chunk for prompt, tokens in pairs for chunk in ([SEPARATOR, *prompt], tokens)]
            body = {"corpus_id": "slime", "token_chunks": chunks}
            httpx.post(f"{engine.url}/add_external_corpus", json=body, timeout=600.0).raise_for_status()
            measure("epoch 1 on another engine", engine.url, _SEEDS[1])


if __name__ == "__main__":
    main()
