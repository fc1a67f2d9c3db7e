"""The effect of ``--use-distributed-post`` on the rollout manager: its processor time per request, and the requests per
second, with replies as long as those of a reasoning model.

    python benchmarks/distributed_post.py

The engine is a process that answers every request with the same reply in SGLang's format. Everything is on one host, so
the network card, the other reason to post from several nodes, is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy
import ray

from slime.config.groups import RunConfig
from slime.ray.engines.http_workers import start_http_workers
from slime.utils import http_utils
from slime.utils.net import free_port


def engine(port: int, num_tokens: int) -> None:
    """Answers until it is killed."""
    from aiohttp import web

    # The reply is made once: this process must not be slower than the manager.
    ids = [random.randrange(150_000) for _ in range(num_tokens)]
    # A single-precision value prints with about 17 digits, like an engine's log-probs.
    rows = [[float(numpy.float32(-random.expovariate(2))), token, None] for token in ids]
    reply = json.dumps({"text": "", "output_ids": ids, "meta_info": {"output_token_logprobs": rows}})

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(text=reply, content_type="application/json")

    app = web.Application()
    app.add_routes([web.post("/generate", generate)])
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *words: None)


async def post_all(url: str, number: int, at_once: int) -> None:
    places = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with places:
            await http_utils.post(url, {"input_ids": list(range(512))}, timeout_s=120.0)

    await asyncio.gather(*(one() for _ in range(number)))
    # The client belongs to this event loop, which asyncio.run closes.
    await http_utils.close_http_client()


def measure(url: str, options: Namespace) -> dict[str, float]:
    asyncio.run(post_all(url, options.at_once, options.at_once))  # connections are made
    # process_time counts this process only, which plays the manager: not the engine, not the workers.
    wall, processor = time.monotonic(), time.process_time()
    asyncio.run(post_all(url, options.requests, options.at_once))
    wall, processor = time.monotonic() - wall, time.process_time() - processor
    return {
        "requests per s": options.requests / wall,
        "ms of the manager's processor": 1e3 * processor / options.requests,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="of a reply")
    parser.add_argument("--posters", type=int, default=2)
    options = parser.parse_args()
    port = free_port()
    # A fork of a process with threads may inherit locks that are never released.
    server = multiprocessing.get_context("spawn").Process(target=engine, args=(port, options.tokens), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port}/generate"
    results: dict[str, Any] = {"by itself": measure(url, options)}
    ray.init(address="local", num_cpus=4, num_gpus=options.posters, include_dashboard=False, log_to_driver=False)
    args = Namespace(
        num_gpus_per_node=8, rollout_num_gpus=1, rollout_num_gpus_per_engine=1, sglang_server_concurrency=64
    )
    workers = start_http_workers(RunConfig.of(args))
    workers.wait_ready(60.0)
    results[f"{options.posters} posters"] = measure(url, options)
    ray.shutdown()
    server.kill()
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
