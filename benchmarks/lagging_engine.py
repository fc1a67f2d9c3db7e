"""Duration of a rollout on two engines, one of which decodes three times slower, by policy of the router.

    python benchmarks/lagging_engine.py

The rollout and the router are the real ones, over HTTP. Engines are simulated: each decodes ``--slots`` requests at
once, holds further ones in its queue, and sleeps for the time of a response. 32 prompts have 8 responses each, of 50 to
150 tokens. Prints which engine finished the requests, how many groups were on both engines, and the time of the rollout
÷ the ideal time, in which both engines are full to the end. ``in flight`` is the limit of
``--sglang-server-concurrency`` times engines. ``moves``: whether requests leave the queue of the slower engine
(``slime/rollout/direct_engines.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.sglang_utils.router import RouterProcess, registered_workers
from slime.ray.arguments import parse_args
from slime.rollout import direct_engines
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.net import free_port
from tools.make_tiny_task import TinyTask, make_tiny_task

_PROMPTS, _GROUP, _LAG = 32, 8, 3
_LENGTHS = (50, 150)
_EVERY_S = direct_engines._EVERY_S
_CASES = (("cache_aware", False), ("cache_aware", True), ("round_robin", False))


class Engine:
    """A server that answers after the time of the response.

    Attributes:
        finished: number of responses to each prompt.
    """

    def __init__(self, token_s: float, slots: int, lengths: dict[tuple[tuple[int, ...], int], int]) -> None:
        self._token_s = token_s
        self._num_slots = slots
        self._slots = asyncio.Semaphore(slots)
        self._lengths = lengths
        self._aborted: dict[str, asyncio.Event] = {}
        self.finished: Counter[tuple[int, ...]] = Counter()

    async def start(self) -> str:
        """Returns the address."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_route("*", "/{path:.*}", self._describe)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids, seed = tuple(body["input_ids"]), body["sampling_params"]["sampling_seed"]
        prompt = next((known for known, _ in self._lengths if ids[: len(known)] == known), ids)
        length = self._lengths.setdefault((prompt, seed), random.Random(f"{prompt} {seed}").randrange(*_LENGTHS))
        left = length - (len(ids) - len(prompt))
        aborted = self._aborted[body["rid"]] = asyncio.Event()
        slot = asyncio.create_task(self._slots.acquire())
        await asyncio.wait([slot, stop := asyncio.create_task(aborted.wait())], return_when=asyncio.FIRST_COMPLETED)
        count = 0
        if slot.done():
            began = time.perf_counter()
            await asyncio.wait([stop], timeout=self._token_s * left)
            self._slots.release()
            count = min(left, int((time.perf_counter() - began) / self._token_s) if aborted.is_set() else left)
        slot.cancel()
        stop.cancel()
        del self._aborted[body["rid"]]
        if count == left:
            self.finished[prompt] += 1
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop" if count == left else "abort"},
            "weight_version": "1",
            "prompt_tokens": len(ids),
            "completion_tokens": count,
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, 5, None]] * count,
        }
        return web.json_response({"text": "x" * count, "output_ids": [5] * count, "meta_info": meta})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for rid in list(self._aborted) if body.get("abort_all") else [body["rid"]]:
            if rid in self._aborted:
                self._aborted[rid].set()
        return web.json_response({})

    async def _describe(self, request: web.Request) -> web.Response:
        running = min(len(self._aborted), self._num_slots)
        loads = [{"num_running_reqs": running, "num_waiting_reqs": len(self._aborted) - running}]
        return web.json_response({"status": "ok", "model_path": "model", "version": "1", "loads": loads})


def measure(task: TinyTask, policy: str, moves: bool, in_flight: int, slots: int, token_s: float) -> str:
    """A row of the table."""
    lengths: dict[tuple[tuple[int, ...], int], int] = {}
    engines = [Engine(token_s, slots, lengths), Engine(token_s * _LAG, slots, lengths)]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def call(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    urls = [call(engine.start()) for engine in engines]
    direct_engines._EVERY_S = _EVERY_S if moves else 1e9
    GenerateState.clear_instances()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "router.log"
        router = RouterProcess(
            "127.0.0.1", None, request_timeout_s=600, log_path=log, flags=["--router-policy", policy]
        )
        try:
            router.wait_ready()
            for url in urls:
                httpx.post(f"{router.url}/workers", json={"url": url}, trust_env=False).raise_for_status()
            deadline = Deadline(60.0, f"the registration of {len(urls)} engines")
            wait_until(lambda: len(registered_workers(router.url)) == len(urls), deadline)
            words = [
                *("--hf-checkpoint", task.model, "--prompt-data", f"{task.train}@[0:{_PROMPTS}]", "--num-rollout", 1),
                *("--apply-chat-template", "--rollout-batch-size", _PROMPTS, "--n-samples-per-prompt", _GROUP),
                *("--rm-type", "random", "--rollout-max-response-len", _LENGTHS[1], "--rollout-num-gpus", 2),
                *("--sglang-server-concurrency", in_flight // 2, "--debug-rollout-only"),
                "--sglang-enable-deterministic-inference",
            ]
            args = parse_args(argv=[str(word) for word in words])
            args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", httpx.URL(router.url).port
            source = RolloutDataSource(args)
            GenerateState(args)  # loads the tokenizer
            began = time.perf_counter()
            generate_rollout(args, 0, source)
            seconds = time.perf_counter() - began
        finally:
            router.stop()
    ideal = sum(lengths.values()) * token_s / (slots * (1 + 1 / _LAG))
    fast, slow = (engine.finished for engine in engines)
    counts = f"{fast.total()} + {slow.total()} | {len(fast.keys() & slow.keys())} of {_PROMPTS}"
    return f"| {policy} | {in_flight} | {'yes' if moves else 'no'} | {counts} | {seconds / ideal:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--token-ms", type=float, default=30.0, help="of the fast engine")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 32])
    parser.add_argument("--only", type=int, nargs="+", default=[0, 1, 2], help="rows, by policy and moves")
    options = parser.parse_args()
    print("| policy | in flight | moves | requests, fast + slow engine | groups on both | rollout ÷ ideal |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        task = make_tiny_task(folder)
        for policy, moves in (_CASES[number] for number in options.only):
            for in_flight in options.in_flight:
                row = measure(task, policy, moves, in_flight, options.slots, options.token_ms / 1000)
                print(row, flush=True)


if __name__ == "__main__":
    main()
