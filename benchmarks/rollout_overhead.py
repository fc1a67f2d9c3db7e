"""Overhead of the rollout per sample: 10,000 samples in flight, each waiting one second for a tool.

    python benchmarks/rollout_overhead.py

A custom generate function replaces the agent: it waits and appends a few tokens. No engine starts. Everything else is
the default rollout function: data source, tasks, slots, hooks, reward, collecting. Prints the wall time beyond the
tool's second and the processor time, per sample, and the processor time of this process while all samples wait, which
is about zero because nothing polls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.data.sample import Sample, iter_samples
from slime.ray.arguments import parse_args
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sglang_rollout import generate_rollout
from tools.make_tiny_task import make_tiny_task

HERE = str(Path(__file__).resolve())


class Waiting:
    """Counts the samples that wait for their tool."""

    number = 0
    all_wait = threading.Event()
    wanted = 0


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    Waiting.number += 1
    if Waiting.number == Waiting.wanted:
        Waiting.all_wait.set()
    await asyncio.sleep(args.tool_s)
    Waiting.number -= 1
    sample.tokens = [1, 2, 3]
    sample.append_response_tokens(tokens=[4, 5], log_probs=[-0.5, -0.5], text="done")
    sample.reward = 1.0
    return sample


def main() -> None:
    import benchmarks.rollout_overhead as module  # the copy that the rollout function calls, not __main__

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--tool-s", type=float, default=1.0)
    parser.add_argument("--idle-s", type=float, default=3.0, help="how long the samples of the second run wait")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        task = make_tiny_task(Path(folder) / "task")
        flags = {
            "--hf-checkpoint": task.model,
            "--prompt-data": task.train,
            "--rollout-batch-size": options.samples // options.samples_per_prompt,
            "--n-samples-per-prompt": options.samples_per_prompt,
            "--rollout-max-response-len": 16,
            "--sglang-server-concurrency": options.samples,
            "--rollout-num-gpus": 1,
            "--num-rollout": 1,
            "--rm-type": "random",
            "--custom-generate-function-path": "benchmarks.rollout_overhead.generate",
        }
        words = [str(word) for pair in flags.items() for word in pair]
        args = parse_args(argv=[*words, "--debug-rollout-only", "--apply-chat-template"])
        source = RolloutDataSource(args)
        module.Waiting.wanted = options.samples
        args.tool_s = 0.0
        # Imports, the tokenizer and the event loop's thread are not overhead per sample.
        generate_rollout(args, 0, source)  # warm-up
        args.tool_s = options.tool_s
        wall, cpu = time.perf_counter(), time.process_time()
        output = generate_rollout(args, 1, source)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        count = sum(1 for _ in iter_samples(output.samples))
        # Longer than the measurement: no sample may finish while processor time is counted.
        args.tool_s = options.idle_s + 10.0
        module.Waiting.number = 0
        module.Waiting.all_wait.clear()
        # A daemon: the process ends without waiting for these samples.
        threading.Thread(target=lambda: generate_rollout(args, 2, source), daemon=True).start()
        assert module.Waiting.all_wait.wait(60)
        # The last tasks settle before the clock starts.
        time.sleep(1.0)
        idle = time.process_time()
        time.sleep(options.idle_s)
        idle = (time.process_time() - idle) / options.idle_s
    result = {
        "samples": count,
        "wall_s": round(wall, 2),
        "overhead_us_per_sample": round((wall - options.tool_s) / count * 1e6),
        "cpu_us_per_sample": round(cpu / count * 1e6),
        "cpu_share_while_all_wait": round(idle, 4),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
