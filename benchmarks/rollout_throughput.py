"""Tokens per second of a whole rollout, against the same requests sent by SGLang's own load generator.

    python benchmarks/rollout_throughput.py

One engine on the demo's model. In turn, the default rollout function makes a batch (data source, requests, samples with
log-probs, rewards), and ``sglang.benchmark.serving`` sends the same prompts with the same settings at the same
concurrency. Each runs in a new process, and is timed from its first request to its last answer. Prints the rates of
every round, their medians, and the median of the rounds' ratios, which is least sensitive to other work on the machine.
The goal is 0.95.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# ignore_eos gives both sides the same number of tokens.
SETTINGS = {"temperature": 1.0, "ignore_eos": True}


def make_batch(job: dict[str, Any]) -> float:
    """Tokens per second of one rollout of the default rollout function."""
    from slime.data.sample import iter_samples
    from slime.ray.arguments import parse_args
    from slime.rollout.data_source import RolloutDataSource
    from slime.rollout.sglang_rollout import GenerateState, generate_rollout

    flags = {
        "--hf-checkpoint": job["model"],
        "--prompt-data": job["prompts"],
        "--rollout-batch-size": len(job["ids"]),
        "--n-samples-per-prompt": job["n"],
        "--rollout-max-response-len": job["new_tokens"],
        "--sglang-server-concurrency": job["concurrency"],
        "--rollout-num-gpus": 1,
        "--num-rollout": 1,
        "--rm-type": "random",
    }
    sys.argv = ["", *(str(word) for pair in flags.items() for word in pair), "--debug-rollout-only"]
    args = parse_args()
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", job["port"]
    GenerateState(args).sampling_params |= SETTINGS
    source = RolloutDataSource(args)
    started = time.perf_counter()
    output = generate_rollout(args, 0, source)
    seconds = time.perf_counter() - started
    return sum(sample.response_length for sample in iter_samples(output.samples)) / seconds


def send_load(job: dict[str, Any]) -> float:
    """Tokens per second of SGLang's load generator."""
    sys.modules["datasets"] = types.ModuleType(
        "datasets"
    )  # it imports the package for data sets that are not used here
    sys.modules["datasets"].load_dataset = None  # type: ignore[attr-defined]
    from sglang.benchmark import serving

    url = f"http://127.0.0.1:{job['port']}"
    options = Namespace(
        **{"backend": "sglang", "dataset_name": "custom", "disable_tqdm": True, "disable_stream": True},
        **{"disable_ignore_eos": False, "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0},
        **{"token_ids_logprob": None, "return_routed_experts": False, "warmup_requests": 0, "temperature": 1.0},
        **{"top_p": 1.0, "plot_throughput": False, "cache_report": False, "output_file": job["log"]},
        **{"output_details": False, "sharegpt_output_len": None, "random_input_len": 0, "random_output_len": 0},
        **{"random_range_ratio": 0.0, "header": None, "goodput": None, "apply_chat_template": False, "seed": 1},
        **{"num_prompts": 0, "served_model_name": None, "tokenize_prompt": False, "lora_name": None},
    )
    serving.set_global_args(options)
    ends: list[tuple[float, float, int]] = []
    send = serving.ASYNC_REQUEST_FUNCS["sglang"]

    async def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = await send(*args, **kwargs)
        assert output.success, output.error
        ends.append((started, time.perf_counter(), output.output_len))
        return output

    # Notes start and end of every request, so that the result excludes the generator's setup.
    serving.ASYNC_REQUEST_FUNCS["sglang"] = timed
    rows = [serving.DatasetRow(ids, len(ids), job["new_tokens"]) for ids in job["ids"] for _ in range(job["n"])]
    from slime.data.processing import load_tokenizer

    asyncio.run(
        serving.benchmark(
            *("sglang", f"{url}/generate", url, job["model"], load_tokenizer(job["model"]), rows, float("inf")),
            *(job["concurrency"], True, [], None, None, {}, False),
            warmup_requests=0,
        )
    )
    starts, stops, counts = zip(*ends, strict=True)
    return sum(counts) / (max(stops) - min(starts))


# A fresh process per job: connections, caches and patched modules of one must not help or slow the other.
def in_a_process_of_its_own(name: str, job: dict[str, Any]) -> float:
    command = [sys.executable, "-W", "ignore", __file__, "--job", name]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job", choices=("rollout", "load"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print((make_batch if options.job == "rollout" else send_load)(json.load(sys.stdin)))
        return
    from benchmarks.one_engine import one_engine
    from slime.data.processing import load_tokenizer
    from tools.make_tiny_task import make_tiny_task

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        task = make_tiny_task(root / "task")
        texts = [f"{number}+{number * 7 % 90}=" * 6 for number in range(options.prompts)]
        prompts = root / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"input": text, "label": "1"}) + "\n" for text in texts))
        tokenizer = load_tokenizer(task.model)
        job = {
            **{"model": task.model, "prompts": str(prompts), "n": options.samples_per_prompt},
            **{"ids": [tokenizer.encode(text, add_special_tokens=False) for text in texts], "log": str(root / "load")},
            **{"new_tokens": options.new_tokens, "concurrency": options.concurrency},
        }
        with one_engine(root, task.model) as engine:
            job["port"] = int(engine.url.rpartition(":")[2])
            rates: dict[str, list[float]] = {"rollout": [], "load": []}
            in_a_process_of_its_own("load", job)  # warm-up
            for number in range(options.rounds):
                for name, found in rates.items():
                    found.append(in_a_process_of_its_own(name, job))
                print(
                    f"round {number}: " + ", ".join(f"{n} {r[-1]:.0f} tokens/s" for n, r in rates.items()), flush=True
                )
    rollout, load = (statistics.median(found) for found in rates.values())
    # Pairs of one round: a slow phase of the machine affects both.
    ratio = statistics.median(ours / theirs for ours, theirs in zip(*rates.values(), strict=True))
    print(json.dumps({"rollout": round(rollout), "load_generator": round(load), "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
