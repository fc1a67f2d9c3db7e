"""List the kernels and operators that take the most time, from traces of torch's profiler.

    python tools/analyze_profile.py --profile-dir outputs/run/profile [--rank 0 | --all-ranks] [--top-n 20]

Reads ``*.trace.json.gz`` of the trainer (``--use-pytorch-profiler``) and of engines (``tools/profile_rollout.py``).
Counts the GPU kernels of a trace. A trace without any is counted by the self time of its CPU operators.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_RANK = re.compile(r"(?:rank|TP)[_-](\d+)", re.IGNORECASE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile-dir", type=Path, required=True)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, default=0, help="default %(default)s")
    which.add_argument("--all-ranks", action="store_true")
    parser.add_argument("--top-n", type=int, default=20, help="default %(default)s")
    options = parser.parse_args()
    files = sorted(options.profile_dir.rglob("*.trace.json.gz"))
    # A file without a rank in its name may belong to any rank, so it is always shown.
    chosen = [file for file in files if options.all_ranks or rank_of(file) in (options.rank, None)]
    if not chosen:
        wanted = "" if options.all_ranks else f" of rank {options.rank}"
        print(f"{options.profile_dir} holds no *.trace.json.gz{wanted}", file=sys.stderr)
        return 1
    for file in chosen:
        report(file, options.top_n)
    return 0


def rank_of(file: Path) -> int | None:
    """The rank in a file's name. None if the name has no rank."""
    match = _RANK.search(file.name)
    return int(match.group(1)) if match else None


def report(file: Path, top_n: int) -> None:
    """Print the most expensive names of a trace."""
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        events = [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
    # Copies and fills take time on the GPU like kernels. Operators of a GPU trace only launch
    # work, so their times are ignored if the trace has kernels.
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    what = "GPU kernels" if kernels else "CPU operators"
    times = by_name((event["name"], event["dur"]) for event in kernels) if kernels else by_name(own_times(events))
    total = sum(seconds for seconds, _ in times.values())
    print(f"{file.name}: {what}, {total:.4f} s")
    print(f"{'seconds':>10} {'share':>7} {'calls':>7}  name")
    for name, (seconds, calls) in sorted(times.items(), key=lambda item: -item[1][0])[:top_n]:
        print(f"{seconds:>10.4f} {seconds / total:>7.1%} {calls:>7}  {name[:100]}")
    print()


def by_name(durations: Iterable[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    """(seconds, calls) by name, from microseconds."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for name, microseconds in durations:
        seconds, calls = found[name]
        # The trace format has durations in microseconds.
        found[name] = (seconds + microseconds / 1e6, calls + 1)
    return dict(found)


def own_times(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Each operator's time without that of the operators it calls, thread by thread."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[(event["pid"], event["tid"])].append(event)
    # Operators nest within a thread only. Two threads overlap without calling each other.
    for operators in threads.values():
        # At equal starts the caller is the longer one and must come before the operators that it calls.
        yield from _own_times_of_thread(sorted(operators, key=lambda event: (event["ts"], -event["dur"])))


def _own_times_of_thread(operators: list[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    own = [float(event["dur"]) for event in operators]
    open_calls: list[int] = []
    for place, event in enumerate(operators):
        while open_calls and operators[open_calls[-1]]["ts"] + operators[open_calls[-1]]["dur"] <= event["ts"]:
            open_calls.pop()
        # Only the direct caller loses this time: its callers already lost the whole duration of it.
        if open_calls:
            own[open_calls[-1]] -= event["dur"]
        open_calls.append(place)
    return zip((event["name"] for event in operators), own, strict=True)


if __name__ == "__main__":
    sys.exit(main())
