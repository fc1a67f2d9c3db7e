"""Growth of memory, descriptors, threads and files over many rollouts of a tiny run: a table in docs/reliability.md.

    python benchmarks/soak.py [--rollouts 4000] [--record FILE] [--write]

A run with one trainer rank and one engine is observed from outside every ten rollouts: for each of its processes the
resident memory without shared pages, file descriptors and threads, and for the whole run bytes in /dev/shm, bytes that
Ray's object store holds, and files in the run's folder and its temporary folder. Growth is the median of the last
quarter of these observations minus that of the first quarter, after a warm-up, per 1,000 rollouts. The goal is at most
1 MB for each process and no handle. The exit status is 1 if it is missed.

--record keeps the observations. If the file exists, it is evaluated and nothing runs: delete it to measure again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.marked_part import with_part
from tests.e2e.faults import shared_memory
from tests.e2e.running import PLUGINS, marked, start_train
from tools.make_tiny_task import make_tiny_task

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
GOALS = {
    "memory_mb": 1.0,
    "fds": 0.0,
    "threads": 0.0,
    "shm_mb": 1.0,
    "store_mb": 1.0,
    "run_files": 2000.0,
    "tmp_files": 0.0,
}
"""Quantity -> the largest growth per 1,000 rollouts. Each rollout records its samples in two files."""

_MARKS = ("<!-- soak: begin -->", "<!-- soak: end -->")
_EVERY = 10
_WARM_UP = 0.2
_POLL_S = 0.5
_STORE = "object_store_bytes"

Quantities = dict[str, float]


def note_object_store(
    rollout_id: int, args: Namespace, samples: Any, rollout_extra_metrics: Any, rollout_time: float
) -> bool:
    """Write the bytes that Ray's object store holds to a file of the run. ``--custom-rollout-log-function-path``."""
    import ray

    name = "object_store_memory"
    held = ray.cluster_resources()[name] - ray.available_resources().get(name, 0.0)
    (Path(args.output_dir) / args.experiment_name / _STORE).write_text(f"{held}")
    return False


def soak_flags(task: Any, output: Path, num_rollout: int) -> list[Any]:
    """A run whose rollouts are as short as possible."""
    return [
        *("--hf-checkpoint", task.model, "--prompt-data", task.train, "--label-key", "label", "--apply-chat-template"),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 4),
        *("--custom-rm-path", f"{PLUGINS}:share_of_sevens", "--fp32"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--lr", "1e-5", "--use-fault-tolerance"),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--num-rollout", num_rollout),
        *("--sglang-context-length", 128, "--sglang-max-total-tokens", 4096),
        *("--custom-rollout-log-function-path", f"{Path(__file__).resolve()}:note_object_store"),
        *("--output-dir", output, "--experiment-name", "run"),
    ]


def observe(mark: str, output: Path, temporary: Path) -> tuple[dict[str, Quantities], Quantities]:
    """The quantities of each process of the run, by name and pid, and those of the run."""
    processes = {}
    for pid, command in marked(mark):
        found = _of_process(pid)
        if found is not None:
            name, values = found
            # The processes of an engine have the command line of the process that they are forked from.
            processes[f"{name if name.startswith('sglang::') else name_of(command)} {pid}"] = values
    store = output / "run" / _STORE
    run = {
        "shm_mb": sum(path.stat().st_size for path in shared_memory(mark) if path.exists()) / 1e6,
        "store_mb": float(store.read_text() or 0) / 1e6 if store.exists() else 0.0,
        "run_files": _num_files(output),
        "tmp_files": _num_files(temporary),
    }
    return processes, run


def _of_process(pid: int) -> tuple[str, Quantities] | None:
    """The kernel's name of the process, and its quantities. None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        # Without RssShmem: pages of Ray's object store that a process has touched are not the memory of that process.
        kib = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile"))
        fds = len(os.listdir(f"/proc/{pid}/fd"))
        return fields["Name"].strip(), {"memory_mb": kib * 1024 / 1e6, "fds": fds, "threads": int(fields["Threads"])}
    except (OSError, KeyError):
        return None


def _num_files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def name_of(command: str) -> str:
    """Short name of a process: of the actor, the program or the module."""
    words = command.split()
    first = words[0] if words else "?"
    if first.startswith("ray::"):
        return first.partition(".")[0]  # behind the dot is the method that runs now
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    script = next((word for word in words[1:] if word.endswith(".py")), first)
    return Path(script).name


def soak(num_rollout: int, record: Path) -> None:
    """Run, and write one line for every tenth rollout."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name, tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        output = Path(name)
        task = make_tiny_task(output / "task")
        flags = soak_flags(task, output, num_rollout)
        process, mark = start_train(flags, output, output / "log", TMPDIR=temporary)
        try:
            with record.open("w", encoding="utf-8") as sink:
                last = -1
                while process.poll() is None:
                    time.sleep(_POLL_S)
                    rollout = _num_trained(output)
                    if rollout // _EVERY <= last // _EVERY:
                        continue
                    last = rollout
                    processes, run = observe(mark, output, Path(temporary))
                    line = {"rollout": rollout, "at": time.time(), "processes": processes, "run": run}
                    sink.write(json.dumps(line) + "\n")
                    sink.flush()
            if process.returncode != 0:
                raise SystemExit(
                    f"the run ended with status {process.returncode}:\n{(output / 'log').read_text()[-6000:]}"
                )
        finally:
            process.kill()


def _num_trained(output: Path) -> int:
    try:
        found = json.loads((output / "run" / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return -1
    return int(found["trainer"].get("rollout_id") or 0) if found["state"] == "running" else -1


def growth(points: Sequence[tuple[int, float]]) -> float:
    """Growth per 1,000 rollouts of (rollout, value): between the medians of the first and the last quarter."""
    # Medians: the memory of one observation may be that of the middle of a step.
    size = max(1, len(points) // 4)
    first, last = points[:size], points[-size:]
    (x0, y0), (x1, y1) = (
        (statistics.median(x for x, _ in part), statistics.median(y for _, y in part)) for part in (first, last)
    )
    return (y1 - y0) / (x1 - x0) * 1000 if x1 > x0 else 0.0


def growths(lines: Iterable[Mapping[str, Any]]) -> tuple[int, dict[str, Quantities]]:
    """Number of rollouts after the warm-up, and the growth of each quantity of each process that lived through them."""
    observed = list(lines)
    begin = observed[-1]["rollout"] * _WARM_UP
    seen = [line for line in observed if line["rollout"] >= begin]
    found: dict[str, Quantities] = {}
    for name in seen[len(seen) // 2]["processes"]:
        of_process = [(line["rollout"], line["processes"][name]) for line in seen if name in line["processes"]]
        if len(of_process) > len(seen) // 2:
            found[name] = {key: growth([(x, values[key]) for x, values in of_process]) for key in of_process[0][1]}
    found["run"] = {key: growth([(line["rollout"], line["run"][key]) for line in seen]) for key in seen[0]["run"]}
    return seen[-1]["rollout"] - seen[0]["rollout"], found


def misses(found: Mapping[str, Quantities]) -> list[str]:
    """The quantities that grow by more than their goal."""
    # Half a handle per 1,000 rollouts is the difference of two medians, not a handle.
    return [
        f"{name}: {key} grows by {value:.1f} per 1,000 rollouts"
        for name, values in found.items()
        for key, value in values.items()
        if value > max(GOALS[key], 0.5)
    ]


def page_part(num_rollout: int, found: Mapping[str, Quantities]) -> str:
    rows = [f"Growth per 1,000 rollouts, observed over {num_rollout} rollouts after the warm-up:", ""]
    rows += ["| process | resident memory | file descriptors | threads |", "|---|---|---|---|"]
    for name, values in found.items():
        if name != "run":
            rows.append(
                f"| {name.rpartition(' ')[0]} | {values['memory_mb']:+.1f} MB | {values['fds']:+.0f} | "
                f"{values['threads']:+.0f} |"
            )
    run = found["run"]
    rows += [
        "",
        f"`/dev/shm` {run['shm_mb']:+.1f} MB, Ray's object store {run['store_mb']:+.1f} MB, files in the run's",
    ]
    rows += [f"folder {run['run_files']:+.0f}, temporary files {run['tmp_files']:+.0f}."]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4000, help="number of rollouts")
    parser.add_argument("--record", type=Path, default=ROOT / "outputs" / "soak.jsonl", help="file of observations")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reliability.md")
    options = parser.parse_args()
    if not options.record.exists():
        options.record.parent.mkdir(parents=True, exist_ok=True)
        soak(options.rollouts, options.record)
    lines = [json.loads(line) for line in options.record.read_text(encoding="utf-8").splitlines()]
    num_rollout, found = growths(lines)
    part = page_part(num_rollout, found)
    print(part)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_part(PAGE.name, text, _MARKS, part), encoding="utf-8")
    problems = misses(found)
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
