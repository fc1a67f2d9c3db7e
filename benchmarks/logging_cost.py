"""Cost of logging per step: metrics, spans, recorded samples, metrics.jsonl and event files.

    python benchmarks/logging_cost.py [--samples 256] [--tokens 1000] [--tokens-per-s 50000] [--run outputs/demo/grpo]

Prints milliseconds by part, and their share of a step that generates and trains ``samples * tokens`` tokens at
``--tokens-per-s``, or of the median step of a real run. The default is a fast node: a slower one has longer steps and
a smaller share. Bound: less than 1 %. A thread writes the files of samples during the run: its time is separate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.data.sample import Sample
from slime.observability.arguments import OutputArgs
from slime.observability.rollout_metrics import log_rollout_data
from slime.observability.sample_record import BackgroundWriter, record_rollout, record_training
from slime.observability.sinks import JsonlSink, TensorboardSink
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.observability.tracking import Tracker

# Share of a step.
BOUND = 0.01
ROUNDS = 15
FLUSH_TIMEOUT_S = 60.0
ARGS = Namespace(
    advantage_estimator="grpo",
    reward_key=None,
    rollout_num_gpus=8,
    rollout_max_response_len=8192,
    n_samples_per_prompt=8,
    log_passrate=True,
    log_reward_category=None,
    log_multi_turn=True,
    log_correct_samples=True,
)
META = {
    "id": "r",
    "prompt_tokens": 100,
    "completion_tokens": 1000,
    "e2e_latency": 3.0,
    "finish_reason": {"type": "stop"},
}


def make_samples(count: int, tokens: int) -> list[Sample]:
    return [
        Sample(
            group_index=i // 8,
            index=i,
            prompt="How many? " * 20,
            tokens=[random.randrange(100_000) for _ in range(tokens + 100)],
            response="so much text " * (tokens // 3),
            response_length=tokens,
            reward=float(i % 2),
            loss_mask=[1] * tokens,
            rollout_log_probs=[-random.random() for _ in range(tokens)],
            weight_versions=["3"],
            status=Sample.Status.COMPLETED,
        )
        for i in range(count)
    ]


def parts(samples: list[Sample], folder: Path, writer: BackgroundWriter) -> dict[str, Callable[[], None]]:
    """The logging work of a step, by name."""
    limit = OutputArgs().record_samples
    rows = [torch.randn(sample.response_length) for sample in samples]
    columns = {
        "partition": list(range(len(samples))),
        "sample_indices": [sample.index for sample in samples],
        "rewards": [sample.reward for sample in samples],
        "log_probs": rows,
        "ref_log_probs": rows,
        "advantages": [torch.full_like(row, 0.5) for row in rows],  # of GRPO: one number per sample
    }
    tracker = Tracker([JsonlSink(folder / "metrics.jsonl"), TensorboardSink(folder)])
    metrics = {f"rollout/metric_{i}": 0.1 * i for i in range(80)} | {"rollout/step": 3}
    step = {f"train/metric_{i}": 0.1 * i for i in range(20)} | {"train/step": 3}

    def spans() -> None:
        for sample in samples:
            # Otherwise every round would append to the trace of the round before.
            sample.trace = None  # type: ignore[attr-defined]
            with (
                trace_span(sample, "generate_and_rm_group", attrs={"group_size": 8}),
                trace_span(sample, "generate_and_rm"),
            ):
                with trace_span(sample, "sglang_generate", attrs={"max_new_tokens": 8192}) as span:
                    pass
                span.update(build_sglang_meta_trace_attrs(META))
                with trace_span(sample, "reward_model"):
                    pass

    # A new number per call: replacing a file would flush it to the disk first, and a run replaces none.
    rollouts = itertools.count()

    def write() -> None:
        tracker.log(metrics, "rollout/step")
        tracker.log(step, "train/step")

    return {
        "spans of all samples": spans,
        "metrics of the rollout": lambda: log_rollout_data(3, ARGS, samples, {}, 10.0) and None,
        f"record of {limit} samples": lambda: record_rollout(
            # With a writer this call returns before the file is written: its rest is the second figure.
            folder,
            samples,
            rollout_id=next(rollouts),
            limit=limit,
            reward_key=ARGS.reward_key,
            writer=writer,
        ),
        "record of their training": lambda: record_training(
            folder, columns, rollout_id=next(rollouts), limit=limit, data_parallel_rank=0
        ),
        "metrics.jsonl and events": write,
    }


def median_ms(part: Callable[[], None], writer: BackgroundWriter) -> tuple[float, float]:
    """Median milliseconds of the caller, and of the writer thread after it."""
    # The first call also imports and opens files, which a run pays once.
    part()  # imports
    writer.flush(FLUSH_TIMEOUT_S)
    own, later = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        part()
        own.append(time.perf_counter() - started)
        writer.flush(FLUSH_TIMEOUT_S)
        later.append(time.perf_counter() - started - own[-1])
    return statistics.median(own) * 1000, statistics.median(later) * 1000


def step_of_run(run: Path) -> float:
    """Median seconds of a step of a real run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return statistics.median(record["perf/step_time"] for record in records if record.get("perf/step_time"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--tokens-per-s", type=float, default=50_000)
    parser.add_argument("--run", type=Path, help="a real run's folder, whose steps are the measure instead")
    options = parser.parse_args()
    samples, writer = make_samples(options.samples, options.tokens), BackgroundWriter()
    with tempfile.TemporaryDirectory() as folder:
        cost = {name: median_ms(part, writer) for name, part in parts(samples, Path(folder), writer).items()}
    for name, (own, _) in cost.items():
        print(f"{name:<30} {own:8.1f} ms")
    all_ms = sum(own for own, _ in cost.values())
    step_s = step_of_run(options.run) if options.run else options.samples * options.tokens / options.tokens_per_s
    share = all_ms / 1000 / step_s
    print(f"{'all':<30} {all_ms:8.1f} ms = {share:.2%} of a step of {step_s:.1f} s, bound {BOUND:.0%}")
    print(f"{'beside it, by the writer':<30} {sum(later for _, later in cost.values()):8.1f} ms")
    return int(share >= BOUND)


if __name__ == "__main__":
    sys.exit(main())
