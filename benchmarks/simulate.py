"""Simulate the control plane under many fault schedules: the figures of docs/reliability.md.

    python benchmarks/simulate.py [--seeds N] [--first SEED] [--jobs N]
    python benchmarks/simulate.py --seed SEED
    python benchmarks/simulate.py --kills [--jobs N]

The first form prints the counts and every seed that breaks a law. Its exit status is 1 if there is one. The second form
replays one seed and prints its events. The third kills the driver at each event of a run without other faults, once for
each kind of run.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.simulation.faults import Fault
from tests.simulation.run import MODES, Result, installed, simulate

_BLOCK = 50


_stand_ins = installed()


def _begin(cores: Any) -> None:
    os.sched_setaffinity(0, {cores.get()})  # one thread runs at a time, and on one core the next one begins faster
    _stand_ins.__enter__()  # for the life of the process: once per block costs 5 ms of processor time per seed


def _block(seeds: range) -> list[Result]:
    return [simulate(seed) for seed in seeds]


def _pool(jobs: int) -> Any:
    # spawned: a child that is forked while threads wait would inherit their locks
    spawned = multiprocessing.get_context("spawn")
    cores = spawned.Queue()
    for core in itertools.islice(itertools.cycle(os.sched_getaffinity(0)), jobs):
        cores.put(core)
    return spawned.Pool(jobs, _begin, (cores,))


def _blocks(seeds: range, jobs: int) -> Iterator[list[Result]]:
    with _pool(jobs) as pool:
        yield from pool.imap_unordered(_block, [seeds[i : i + _BLOCK] for i in range(0, len(seeds), _BLOCK)])


def replay(seed: int) -> int:
    """Print the events of one seed. Returns the exit status."""
    with installed():
        result = simulate(seed, keeps_trace=True)
    print(*result.trace, sep="\n")
    print(f"seed {seed}: {result.mode}; {result.events} events, {result.seconds:.1f} virtual s, hash {result.digest}")
    print(*(f"fault at {fault}" for fault in result.faults), sep="\n")
    print(*result.problems or ["every law was kept"], sep="\n")
    return int(bool(result.problems))


def simulate_many(seeds: range, jobs: int) -> int:
    """Simulate ``seeds`` and print the counts. Returns the exit status."""
    started = time.perf_counter()
    results = [result for block in _blocks(seeds, jobs) for result in block]
    seconds = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    kinds = Counter(fault.kind for result in results for fault in result.faults)
    modes = Counter(result.mode for result in results)
    broken = sorted((result for result in results if result.problems), key=lambda result: result.seed)
    taken = f"{seconds:.0f} s with {jobs} processes ({used.ru_utime + used.ru_stime:.0f} s of processor time)"
    print(f"{len(results)} fault schedules in {taken}, {len(broken)} broke a law")
    print(f"{sum(result.events for result in results)} events, {sum(r.seconds for r in results) / 3600:.0f} virtual h")
    for title, counts in (("runs", modes), ("faults", kinds)):
        print(f"{title}: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    for result in broken:
        print(f"seed {result.seed} ({result.mode}): {result.problems[0].splitlines()[0]}")
    return int(bool(broken))


def _killed(mode: str, events: range) -> list[Result]:
    return [simulate(0, mode=mode, planned=[Fault(at, "kill", "driver")]) for at in events]


def kill_everywhere(jobs: int) -> int:
    """Kill the driver at each event of each kind of run, and print the counts. Returns the exit status."""
    with installed():
        lengths = {mode: simulate(0, mode=mode, planned=[]).events for mode in MODES}
    started = time.perf_counter()
    blocks = [(mode, range(i, min(i + _BLOCK, n))) for mode, n in lengths.items() for i in range(1, n, _BLOCK)]
    with _pool(jobs) as pool:
        results = [result for block in pool.starmap(_killed, blocks, chunksize=1) for result in block]
    seconds = time.perf_counter() - started
    broken = [result for result in results if result.problems]
    print(f"{len(results)} runs whose driver was killed in {seconds:.0f} s, {len(broken)} broke a law")
    print(", ".join(f"{length} events of {mode}" for mode, length in lengths.items()))
    for result in broken:
        print(f"{result.mode}, {result.faults[0]}: {result.problems[0].splitlines()[0]}")
    return int(bool(broken))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000, help="number of fault schedules")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="replay this seed and print its events")
    parser.add_argument("--kills", action="store_true", help="kill the driver at each event of each kind of run")
    options = parser.parse_args()
    if options.kills:
        return kill_everywhere(options.jobs)
    if options.seed is not None:
        return replay(options.seed)
    return simulate_many(range(options.first, options.first + options.seeds), options.jobs)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="slime-simulation-") as folder:
        os.environ["TMPDIR"] = folder  # the end of a pool kills its processes, which then delete nothing
        sys.exit(main())
