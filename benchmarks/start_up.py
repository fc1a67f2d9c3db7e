"""Seconds from ``python train.py`` to the first trained step, and the processor time of each process until then.

    python benchmarks/start_up.py [--trees . ../before] [--rounds 3]

One engine, two trainer ranks, a model of a million parameters, on a CPU. Several checkouts take turns, so that other
work of the machine meets all of them. The figures are medians. Processor time hardly depends on other work, seconds do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.make_tiny_task import TinyTask, make_tiny_task

ROOT = Path(__file__).resolve().parents[1]
LOOK_EVERY_S = 0.25
RUN_TIMEOUT_S = 1200
NAMES = {
    r"train\.py": "driver",
    r"ray::(\w+)": "",
    r"fork_server|import preloading": "processes are forked from it",
    r"sglang::(\w+)": "",
    r"gcs_server|raylet": "Ray's servers",
    r"dashboard\.py|monitor\.py|log_monitor": "Ray's monitors and dashboard",
    r"dashboard/agent|runtime_env/agent": "Ray's agents",
    r"worker_launcher|setup_worker|default_worker": "workers until they have a name",
    r"slime\.utils\.reaper": "reaper",
    r"router": "router",
}


@dataclass
class Start:
    """One start. ``cpu_s``: kind of process -> seconds of processor time until the first step."""

    wall_s: float = 0.0
    load: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)


def kind_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    for pattern, name in NAMES.items():
        if match := re.search(pattern, words):
            return name or match[0]
    return "other"


def first_step_s(metrics: Path) -> float | None:
    with contextlib.suppress(FileNotFoundError):
        for line in metrics.read_text(encoding="utf-8").splitlines():
            if "perf/first_step_time" in line:
                return float(json.loads(line)["perf/first_step_time"])
    return None


def measure(tree: Path, task: TinyTask, output: Path) -> Start:
    """Run two rollouts with the code of ``tree``."""
    flags = [
        *("--hf-checkpoint", task.model, "--prompt-data", task.train, "--label-key", "label", "--apply-chat-template"),
        *("--rollout-batch-size", 16, "--n-samples-per-prompt", 8, "--rollout-max-response-len", 8, "--fp32"),
        *("--rm-type", "math", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--num-rollout", 2),
        *("--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1, "--sglang-context-length", 128),
        *("--sglang-max-total-tokens", 16384, "--output-dir", output, "--experiment-name", "run"),
    ]
    env = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, str(tree / "train.py"), *map(str, flags)]
    with (output / "terminal").open("w") as sink:
        run = psutil.Popen(command, cwd=output, env=env, stdout=sink, stderr=subprocess.STDOUT)
    seen: dict[psutil.Process, tuple[str, float]] = {}
    deadline = time.monotonic() + RUN_TIMEOUT_S
    start = Start()
    while run.poll() is None and time.monotonic() < deadline:
        for process in [run, *run.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                seen[process] = (kind_of(process), sum(process.cpu_times()[:2]))
        if not start.cpu_s and (seconds := first_step_s(output / "run" / "metrics.jsonl")) is not None:
            cpu_s: dict[str, float] = defaultdict(float)
            for kind, used in seen.values():
                cpu_s[kind] += used
            start = Start(seconds, os.getloadavg()[0], cpu_s)
        time.sleep(LOOK_EVERY_S)
    with contextlib.suppress(psutil.Error):
        run.kill()
    if run.wait() != 0 or not start.cpu_s:
        raise SystemExit(f"the run of {tree} failed:\n" + (output / "terminal").read_text(encoding="utf-8")[-4000:])
    return start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, nargs="+", default=[ROOT], help="checkouts of slime")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.trees]
    starts: dict[Path, list[Start]] = {tree: [] for tree in trees}
    with tempfile.TemporaryDirectory() as directory:
        task = make_tiny_task(Path(directory) / "task")
        for number in range(options.rounds):
            for place, tree in enumerate(trees):
                output = Path(directory) / f"{number}-{place}"
                output.mkdir()
                starts[tree].append(start := measure(tree, task, output))
                used = sum(start.cpu_s.values())
                print(
                    f"{tree}: {start.wall_s:.1f} s, {used:.1f} s of processor time, load {start.load:.0f}", flush=True
                )
    kinds = sorted({kind for of_tree in starts.values() for start in of_tree for kind in start.cpu_s})
    print("| process | " + " | ".join(str(tree) for tree in trees) + " |")
    print("|---" * (len(trees) + 1) + "|")
    for kind in kinds:
        medians = [statistics.median(start.cpu_s.get(kind, 0.0) for start in starts[tree]) for tree in trees]
        print(f"| {kind} | " + " | ".join(f"{median:.1f}" for median in medians) + " |")
    sums = [statistics.median(sum(start.cpu_s.values()) for start in starts[tree]) for tree in trees]
    print("| all | " + " | ".join(f"{one:.1f}" for one in sums) + " |")
    walls = [statistics.median(start.wall_s for start in starts[tree]) for tree in trees]
    print("| seconds to the first step | " + " | ".join(f"{one:.1f}" for one in walls) + " |")


if __name__ == "__main__":
    main()
