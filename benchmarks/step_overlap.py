"""Overhead of the two loops over the work that they arrange: one run of each, with the real stack, on a CPU.

    python benchmarks/step_overlap.py [--rollouts 8] [--markdown docs/performance.md]

The rollout is artificial: random tokens that appear after as long as one training takes, which a first run measures.
Engines, router, weight sync and trainer are the real ones.

    synchronous    step / (rollout + training + weight sync)      overhead of the loop. The goal is at most 1.05
    asynchronous   step / max(rollout, training)                  hidden part of the shorter one. At most 1.15
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.marked_part import with_part
from tools.make_tiny_task import make_tiny_task

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, SAMPLES, LENGTH = 16, 8, 192
FIRST_STEPS = 2
"""Steps that are not counted: caches and allocators fill."""
RUN_TIMEOUT_S = 400
MARKS = ("<!-- step_overlap begin -->", "<!-- step_overlap end -->")

ROLLOUT = '''
"""An artificial rollout: random tokens after {seconds} s."""
import random, time
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.types import Sample

def generate(args, rollout_id, data_source, evaluation=False):
    started = time.monotonic()
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        sample.tokens = [random.randrange(10, 40) for _ in range(8 + {length})]
        sample.response_length, sample.response = {length}, "random"
        sample.rollout_log_probs = [-3.4] * {length}
        sample.reward, sample.status = random.random(), Sample.Status.COMPLETED
    time.sleep(max(0.0, {seconds} - (time.monotonic() - started)))
    return RolloutFnTrainOutput(samples=groups)
'''


@dataclass(frozen=True)
class Steps:
    """Medians over the counted steps of a run, in seconds."""

    step: float
    rollout: float
    train: float
    sync: float


def run(driver: str, directory: Path, task: Any, rollouts: int, rollout_s: float) -> Steps:
    """One run of ``driver`` with rollouts that take ``rollout_s``."""
    name = f"{Path(driver).stem}_{rollout_s:.2f}"
    source = directory / f"{name}.py"
    source.write_text(ROLLOUT.format(seconds=rollout_s, length=LENGTH), encoding="utf-8")
    flags = [
        *("--hf-checkpoint", task.model, "--prompt-data", task.train, "--label-key", "label", "--fp32"),
        *("--rollout-function-path", f"{source}:generate", "--rm-type", "math"),
        *("--rollout-batch-size", PROMPTS, "--n-samples-per-prompt", SAMPLES, "--rollout-max-response-len", LENGTH),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--num-rollout", rollouts + FIRST_STEPS),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--sglang-context-length", 256),
        *("--output-dir", directory, "--experiment-name", name),
    ]
    log = directory / f"{name}.log"
    with log.open("w") as sink:
        command = [sys.executable, str(ROOT / driver), *map(str, flags)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        status = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, env=env, timeout=RUN_TIMEOUT_S)
    if status.returncode:
        raise SystemExit(f"{driver} failed:\n{log.read_text()[-3000:]}")
    return _steps(directory / name / "metrics.jsonl")


def _steps(path: Path) -> Steps:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if record.get("step_key") == "rollout/step"]
    # the last step of train_async.py has no next rollout to wait for
    counted = list(zip(steps[FIRST_STEPS - 1 : -2], steps[FIRST_STEPS:-1], strict=True))
    return Steps(
        # From one record's time stamp to the next: includes waits that no timer covers.
        step=statistics.median(after["time"] - before["time"] for before, after in counted),
        rollout=statistics.median(after["perf/rollout_time"] for _, after in counted),
        train=statistics.median(after["perf/train_time"] for _, after in counted),
        sync=statistics.median(after["perf/update_weights_time"] for _, after in counted),
    )


def measure(rollouts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        task = make_tiny_task(directory / "task")
        # Rollout and training of equal length: then neither can hide the overhead of the loop.
        train_s = run("train.py", directory, task, 4, 0.0).train
        synchronous = run("train.py", directory, task, rollouts, train_s)
        asynchronous = run("train_async.py", directory, task, rollouts, synchronous.train)
    return {
        "synchronous": asdict(synchronous)
        | {"ratio": synchronous.step / (synchronous.rollout + synchronous.train + synchronous.sync)},
        "asynchronous": asdict(asynchronous)
        | {"ratio": asynchronous.step / max(asynchronous.rollout, asynchronous.train)},
    }


def table(result: dict[str, Any]) -> str:
    rows = ["| loop | step | rollout | training | weight sync | ratio | goal |", "|---|---|---|---|---|---|---|"]
    for loop, goal, against in (
        ("synchronous", 1.05, "sum of the three"),
        ("asynchronous", 1.15, "longer of rollout and training"),
    ):
        found = result[loop]
        seconds = " | ".join(f"{found[name]:.2f} s" for name in ("step", "rollout", "train", "sync"))
        rows.append(f"| {loop} | {seconds} | {found['ratio']:.3f} of the {against} | ≤ {goal} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8, help="counted steps of each run")
    parser.add_argument("--markdown", type=Path, help="page with a marked place for the table")
    options = parser.parse_args()
    result = measure(options.rollouts)
    print(json.dumps(result, indent=1))
    print(table(result))
    if options.markdown is not None:
        text = options.markdown.read_text(encoding="utf-8")
        page = with_part(options.markdown.name, text, MARKS, table(result))
        options.markdown.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
