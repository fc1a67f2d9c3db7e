"""Duration of a rollout on two engines, one of which decodes three times slower, by policy of the router.

    python benchmarks/lagging_engine.py

The router is the real one, over HTTP. Engines are simulated: each decodes ``--slots`` requests at once, holds further
ones in its queue, and sleeps for the time of a response. 32 prompts have 8 responses each, of 50 to 150 tokens. Prints
which engine got the requests, how many groups went to both engines, and the time of the rollout ÷ the ideal time, in
which both engines are full to the end. ``in flight`` is the limit of ``--sglang-server-concurrency`` times engines.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.sglang_utils.router import RouterProcess, registered_workers
from slime.utils.deadline import Deadline, wait_until
from slime.utils.net import free_port

_PROMPTS, _GROUP, _LAG = 32, 8, 3
_LENGTHS = (50, 150)
_POLICIES = ("cache_aware", "round_robin")  # power_of_two refuses to start without engines


class Engine:
    """A server that answers after the time of the response.

    Attributes:
        requests: number of requests of each prompt.
    """

    def __init__(self, token_s: float, slots: int) -> None:
        self._token_s = token_s
        self._slots = asyncio.Semaphore(slots)
        self.requests: Counter[int] = Counter()

    async def start(self) -> str:
        """Returns the address."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_route("*", "/{path:.*}", self._describe)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests[body["input_ids"][0]] += 1
        async with self._slots:
            await asyncio.sleep(self._token_s * body["sampling_params"]["max_new_tokens"])
        return web.json_response({"text": "x", "output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}}})

    async def _describe(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "model_path": "model", "version": "1"})


async def measure(policy: str, in_flight: int, slots: int, token_s: float) -> str:
    """A row of the table."""
    engines = [Engine(token_s, slots), Engine(token_s * _LAG, slots)]
    urls = [await engine.start() for engine in engines]
    lengths = {
        (prompt, i): random.Random(f"{prompt} {i}").randrange(*_LENGTHS)
        for prompt in range(_PROMPTS)
        for i in range(_GROUP)
    }
    with tempfile.TemporaryDirectory() as folder:
        log, flags = Path(folder) / "router.log", ["--router-policy", policy]
        router = RouterProcess("127.0.0.1", None, request_timeout_s=600, log_path=log, flags=flags)
        try:
            await asyncio.to_thread(router.wait_ready)
            limits = httpx.Limits(max_connections=in_flight)
            async with httpx.AsyncClient(base_url=router.url, timeout=600.0, limits=limits, trust_env=False) as client:
                for url in urls:
                    (await client.post("/workers", json={"url": url})).raise_for_status()
                deadline = Deadline(60.0, f"the registration of {len(urls)} engines")
                await asyncio.to_thread(wait_until, lambda: len(registered_workers(router.url)) == len(urls), deadline)

                async def one(prompt: int, length: int) -> None:
                    body = {"input_ids": [prompt] * 64, "sampling_params": {"max_new_tokens": length}}
                    (await client.post("/generate", json=body)).raise_for_status()

                began = time.perf_counter()
                await asyncio.gather(*(one(prompt, length) for (prompt, _), length in lengths.items()))
                seconds = time.perf_counter() - began
        finally:
            router.stop()
    ideal = sum(lengths.values()) * token_s / (slots * (1 + 1 / _LAG))
    fast, slow = (engine.requests for engine in engines)
    counts = f"{fast.total()} + {slow.total()} | {len(fast.keys() & slow.keys())} of {_PROMPTS}"
    return f"| {policy} | {in_flight} | {counts} | {seconds / ideal:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--token-ms", type=float, default=30.0, help="of the fast engine")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 32])
    options = parser.parse_args()
    print("| policy | in flight | requests, fast + slow engine | groups on both | rollout ÷ ideal |")
    print("|---|---|---|---|---|")
    for policy in _POLICIES:
        for in_flight in options.in_flight:
            print(asyncio.run(measure(policy, in_flight, options.slots, options.token_ms / 1000)), flush=True)


if __name__ == "__main__":
    main()
