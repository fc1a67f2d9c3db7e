"""Duration of a rollout whose response lengths have a long tail, with and without --rollout-longest-first.

    python benchmarks/long_tail.py

Data source, tasks, requests, rewards and collecting are real. Engines are simulated: each decodes up to ``--slots``
requests at once, one token of each per step, and has a queue. Requests go to the engines in turn. Each prompt has a
mean length from a log-normal distribution, and each response varies around it. The first rollout teaches the lengths of
the prompts, the second draws the same prompts in another order and is measured, in steps. The ideal time is that of
engines whose slots are always full: all tokens ÷ (engines x slots). No clock is involved, so the figures are exact.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_GROUP = 8
_SIGMA_OF_PROMPTS, _SIGMA_OF_SAMPLES = 1.0, 0.4
_MEDIAN, _LONGEST = 600, 8192


@dataclass
class Engines:
    """Engines that get all requests of a rollout before they decode.

    Attributes:
        wanted: requests of the rollout.
        means: mean length by prompt.
        queues: lengths of the requests of each engine, in the order of their arrival.
    """

    number: int
    slots: int
    wanted: int
    means: dict[str, float]
    seed: int
    queues: list[list[int]] = field(default_factory=list)
    _all_there: asyncio.Event = field(default_factory=asyncio.Event)
    _count: int = 0

    async def send(self, url: str, body: Any, headers: dict[str, str] | None, timeout_s: float) -> Any:
        """One attempt, in place of HTTP (``slime.utils.http_utils.set_sender``)."""
        from slime.utils.http_utils import Reply

        self.queues = self.queues or [[] for _ in range(self.number)]
        engine, self._count = self._count % self.number, self._count + 1
        length = self._length(str(body["input_ids"]))
        self.queues[engine].append(length)
        if self._count == self.wanted:
            self._all_there.set()
        await self._all_there.wait()
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop"},
            "weight_version": "1",
            "prompt_tokens": 1,
            "completion_tokens": length,
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, 5, None]] * length,
        }
        return Reply(200, {"text": "x", "output_ids": [5] * length, "meta_info": meta})

    def _length(self, prompt: str) -> int:
        noise = random.Random(f"{self.seed} {self._count}")
        mean = self.means.setdefault(prompt, random.Random(prompt).lognormvariate(0.0, _SIGMA_OF_PROMPTS) * _MEDIAN)
        return max(1, min(_LONGEST, round(mean * noise.lognormvariate(0.0, _SIGMA_OF_SAMPLES))))

    def ends(self) -> list[int]:
        """Step at which each request ends."""
        return [end for queue in self.queues for end in ends_of(queue, self.slots)]

    @property
    def ideal(self) -> float:
        return sum(map(sum, self.queues)) / (self.number * self.slots)


def ends_of(lengths: Sequence[int], slots: int) -> list[int]:
    """Step at which each request of a queue ends: the next one takes the slot that is free first."""
    free = [0] * slots
    found = []
    for length in lengths:
        found.append(heapq.heappop(free) + length)
        heapq.heappush(free, found[-1])
    return found


def measure(prompts: int, engines: int, slots: int, flags: Sequence[str]) -> tuple[float, float]:
    """(steps of the second rollout, steps after the end of 95 % of its samples), both ÷ the ideal time."""
    from slime.ray.arguments import parse_args
    from slime.rollout.data_source import RolloutDataSource
    from slime.rollout.prompt_history import tail_time
    from slime.rollout.sglang_rollout import generate_rollout
    from slime.utils.http_utils import set_sender
    from tools.make_tiny_task import make_tiny_task

    with tempfile.TemporaryDirectory() as folder:
        task = make_tiny_task(folder)
        rows = Path(task.train).read_text(encoding="utf-8").splitlines()[:prompts]
        data = Path(folder) / "prompts.jsonl"
        data.write_text("\n".join(rows) + "\n", encoding="utf-8")
        words = [
            *("--hf-checkpoint", task.model, "--prompt-data", data, "--apply-chat-template", "--rollout-shuffle"),
            *("--rollout-batch-size", len(rows), "--n-samples-per-prompt", _GROUP, "--rm-type", "random"),
            *("--rollout-max-response-len", _LONGEST, "--rollout-num-gpus", engines, "--num-rollout", 2),
            *("--sglang-server-concurrency", len(rows) * _GROUP, "--debug-rollout-only", *flags),
        ]
        args = parse_args(argv=[str(word) for word in words])
        args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", 1
        source = RolloutDataSource(args)
        means: dict[str, float] = {}
        for rollout_id in range(2):
            fleet = Engines(engines, slots, len(rows) * _GROUP, means, seed=rollout_id)
            set_sender(fleet.send)
            generate_rollout(args, rollout_id, source)
    ends = fleet.ends()
    return max(ends) / fleet.ideal, tail_time(ends) / fleet.ideal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slots", type=int, default=32)
    options = parser.parse_args()
    print("| order of the prompts | rollout ÷ ideal | of it after 95 % of the samples |\n|---|---|---|")
    for title, flags in (("as drawn", []), ("`--rollout-longest-first`", ["--rollout-longest-first"])):
        whole, tail = measure(options.prompts, options.engines, options.slots, flags)
        print(f"| {title} | {whole:.3f} | {tail:.3f} |", flush=True)


if __name__ == "__main__":
    main()
