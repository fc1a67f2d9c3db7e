"""Tokens per second of one engine: 64 concurrent requests of 64 new tokens each, on the demo's model.

    python benchmarks/generation.py

Measures the real server over HTTP, log-probabilities on, through slime's own launcher. Prints one line per round and
the best and median of them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.one_engine import one_engine
from tools.make_tiny_task import make_tiny_task


async def measure(url: str, concurrency: int, new_tokens: int, prompt_tokens: int, vocab_size: int) -> float:
    """Generated tokens per second of ``concurrency`` requests that start together."""
    # The default limit of httpx, 100 connections, would hold further requests back.
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits, trust_env=False) as client:

        async def one() -> int:
            response = await client.post(
                "/generate",
                json={
                    "input_ids": [random.randrange(vocab_size) for _ in range(prompt_tokens)],
                    # ignore_eos: all requests have the same length, so that the batch stays full to the end.
                    "sampling_params": {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True},
                    "return_logprob": True,
                },
            )
            response.raise_for_status()
            return int(response.json()["meta_info"]["completion_tokens"])

        started = time.perf_counter()
        counts = await asyncio.gather(*(one() for _ in range(concurrency)))
        return sum(counts) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        task = make_tiny_task(root / "task")
        with one_engine(root, task.model) as engine:
            # Ids below 20 exist in the vocabulary of every tiny model.
            shape = (options.concurrency, options.new_tokens, options.prompt_tokens, 20)
            asyncio.run(measure(engine.url, *shape))  # warm-up
            rates = []
            for number in range(options.rounds):
                rates.append(asyncio.run(measure(engine.url, *shape)))
                print(f"round {number}: {rates[-1]:8.0f} tokens/s")
            print(f"best {max(rates):.0f} tokens/s, median {statistics.median(rates):.0f} tokens/s")


if __name__ == "__main__":
    main()
