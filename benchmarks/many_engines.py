"""Seconds and memory per sample of a rollout on 1,000 engines, and of its batches for 256 trainer ranks.

    python benchmarks/many_engines.py --write

Engines are simulated: a reply of 16 tokens comes when all requests are there, so that all samples are in flight at
once. Everything else is real: data source, tasks, slots, requests, replies, samples with log-probs, rewards,
collecting, columns, schedule, and the tensors of every rank. Every number of samples runs in new processes, several
times in turn. Seconds are processor time of the process, which depends little on other work of the machine. Memory is
that of the process when all requests wait, and that of the batches. The goal: per sample, flat within 10 %.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.marked_part import with_part

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
MARKS = ("<!-- many_engines begin -->", "<!-- many_engines end -->")
_GROUP = 8
_TOKENS = list(range(4, 20))
_META = {
    "finish_reason": {"type": "stop"},
    "weight_version": "1",
    "prompt_tokens": 8,
    "completion_tokens": len(_TOKENS),
    "cached_tokens": 0,
}


class Engines:
    """Engines that answer when ``wanted`` requests are there."""

    def __init__(self, number: int, wanted: int) -> None:
        self.loads = [0] * number
        self.wanted = wanted
        self.num_requests = 0
        self.peak = 0
        self.all_there: asyncio.Event | None = None

    async def send(self, url: str, body: Any, headers: dict[str, str] | None, timeout_s: float) -> Any:
        """One attempt, in place of HTTP (``slime.utils.http_utils.set_sender``)."""
        from slime.utils.http_utils import Reply

        if self.all_there is None:
            self.all_there = asyncio.Event()
        engine = self.num_requests % len(self.loads)
        self.loads[engine] += 1
        self.num_requests += 1
        if self.num_requests == self.wanted:
            self.peak = psutil.Process().memory_info().rss
            self.all_there.set()
        await self.all_there.wait()
        # new lists for every reply, as from JSON
        log_probs = [[-0.5 - 0.001 * token, token, None] for token in _TOKENS]
        meta = {**_META, "id": body["rid"], "output_token_logprobs": log_probs}
        return Reply(200, {"text": "x" * len(_TOKENS), "output_ids": list(_TOKENS), "meta_info": meta})


def one_size(samples: int, engines: int, ranks: int) -> dict[str, float]:
    """Processor seconds and bytes of one rollout, per sample."""
    from slime.batch.compile import compile_train_data
    from slime.batch.rewards import RewardArgs
    from slime.batch.schedule import MicroBatchArgs, ParallelLayout
    from slime.batch.ship import split_by_dp
    from slime.data.sample import iter_samples
    from slime.doctor.gpu_kernels import HostPeak
    from slime.ray.arguments import parse_args
    from slime.rollout.data_source import RolloutDataSource
    from slime.rollout.sglang_rollout import generate_rollout
    from slime.utils.http_utils import set_sender
    from tools.make_tiny_task import make_tiny_task

    folder = tempfile.TemporaryDirectory()  # until the end of the process: the rollout reads the tokenizer
    task = make_tiny_task(folder.name)
    flags = {
        "--hf-checkpoint": task.model,
        "--prompt-data": task.train,
        "--rollout-batch-size": samples // _GROUP,
        "--n-samples-per-prompt": _GROUP,
        "--rollout-max-response-len": len(_TOKENS),
        "--sglang-server-concurrency": -(-samples // engines),
        "--rollout-num-gpus": engines,
        "--num-rollout": 1,
        "--rm-type": "random",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    args = parse_args(argv=[*words, "--debug-rollout-only", "--apply-chat-template"])
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", 1
    source = RolloutDataSource(args)
    fleet = Engines(engines, wanted=_GROUP)
    set_sender(fleet.send)
    # imports, the tokenizer and the event loop's thread are not overhead per sample
    args.rollout_batch_size = args.over_sampling_batch_size = 1
    compile_train_data(generate_rollout(args, 0, source).samples, rewards=RewardArgs(n_samples_per_prompt=_GROUP))
    args.rollout_batch_size = args.over_sampling_batch_size = samples // _GROUP
    fleet = Engines(engines, wanted=samples)
    set_sender(fleet.send)
    gc.collect()
    before = psutil.Process().memory_info().rss
    started = time.process_time()
    groups = generate_rollout(args, 1, source).samples
    generated = time.process_time()
    settings = MicroBatchArgs(use_dynamic_batch_size=True, max_tokens_per_gpu=256)
    with HostPeak() as memory:
        began = time.process_time()
        data = compile_train_data(groups, rewards=RewardArgs(n_samples_per_prompt=_GROUP))
        compiled = time.process_time()
        shipment = split_by_dp(data, layout=ParallelLayout(dp_size=ranks), global_batch_size=samples, settings=settings)
        done = time.process_time()
    assert sum(1 for _ in iter_samples(groups)) == samples == sum(len(batch["tokens"]) for batch in shipment.ranks)
    assert max(fleet.loads) - min(fleet.loads) <= 1
    return {
        "rollout_us": (generated - started) / samples * 1e6,
        "columns_us": (compiled - began) / samples * 1e6,
        "schedule_us": (done - compiled) / samples * 1e6,
        "in_flight_kib": (fleet.peak - before) / samples / 1024,
        "batch_kib": memory.peak / samples / 1024,
    }


def table(found: dict[int, dict[str, float]], engines: int, ranks: int) -> str:
    """Rows of a page: one per number of samples."""
    lines = [
        f"| samples in flight, {engines:,} engines, {ranks} ranks | rollout | columns | schedule and tensors | "
        "together | memory in flight | memory of the batches |",
        "|---|---|---|---|---|---|---|",
    ]
    for samples, one in found.items():
        total = one["rollout_us"] + one["columns_us"] + one["schedule_us"]
        cells = [f"{one[name]:.0f} µs" for name in ("rollout_us", "columns_us", "schedule_us")] + [f"{total:.0f} µs"]
        cells += [f"{one[name]:.1f} KiB" for name in ("in_flight_kib", "batch_kib")]
        lines.append(f"| {samples:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one_size(options.one, options.engines, options.ranks)), flush=True)
        return
    rounds: dict[int, list[dict[str, float]]] = {samples: [] for samples in options.samples}
    sizes = ["--engines", str(options.engines), "--ranks", str(options.ranks)]
    for _ in range(options.rounds):
        for samples in options.samples:
            command = [sys.executable, __file__, "--one", str(samples), *sizes]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rounds[samples].append(json.loads(done.stdout.splitlines()[-1]))
    found = {
        samples: {name: statistics.median(one[name] for one in of_size) for name in of_size[0]}
        for samples, of_size in rounds.items()
    }
    print(json.dumps(found), flush=True)
    text = table(found, options.engines, options.ranks)
    print(text, flush=True)
    if options.write:
        PAGE.write_text(with_part(PAGE.name, PAGE.read_text(), MARKS, text))


if __name__ == "__main__":
    main()
