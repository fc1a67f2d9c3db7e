"""Runs whose engines grow to three, are preempted at random moments, and shrink to one: a table of a page.

    python benchmarks/elastic_engines.py [--seeds 3] [--seed 0] [--preemptions 5] [--write]

The page is docs/reliability.md. Each seed is one run with one trainer rank and real engines on a CPU. SIGTERM goes to
the server or the actor of a random engine, at a random moment of a rollout. In the end the ledger must know of no
prompt that was lost or trained on twice, and every rollout must have the tokens of one version of the weights.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.marked_part import with_part
from slime.data.ledger import examine_ledger
from tests.e2e.running import marked
from tests.e2e.test_fault_tolerance import flags_for, versions_of
from tests.e2e.watching import Running, is_generating, read_engines_url, running, server_of, serving
from tests.limits import Limit
from tools.make_tiny_task import make_tiny_task

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
_MARKS = ("<!-- elastic: begin -->", "<!-- elastic: end -->")
_LIMIT_S = 1200.0
_LONGEST_PAUSE_S = 1.0


def preempt(run: Running, engines: str, chance: random.Random) -> None:
    """Send SIGTERM to a random engine that generates, and wait until three serve again."""
    url = chance.choice(run.wait(lambda: [url for url in serving(engines) if is_generating(url)]))
    time.sleep(chance.uniform(0, _LONGEST_PAUSE_S))
    before = _num_gone(run)
    if chance.random() < 0.5:
        server_of(url).send_signal(signal.SIGTERM)
    else:
        actors = [pid for pid, command in marked(run.mark) if "ray::EngineActor" in command]
        os.kill(chance.choice(actors), signal.SIGTERM)
    run.wait(lambda: _num_gone(run) > before and len(serving(engines)) == 3)


def _num_gone(run: Running) -> int:
    """Engines that have left, or that ended in the middle of a weight sync."""
    return sum(map(run.text().count, ("its process got SIGTERM", "its process ended")))


def measure(num_preemptions: int, seed: int, num_rollout: int) -> dict[str, Any]:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        output = Path(folder)
        task = make_tiny_task(output / "task")
        more = ("--rollout-num-gpus", 1, "--engines-port", 0)
        flags = flags_for(task, output, *more, reward="share_of_sevens_unless_held", num_rollout=num_rollout)
        with running(flags, output) as run:
            run.limit = Limit(_LIMIT_S)
            run.urls()
            engines = run.wait(lambda: read_engines_url(output))
            run.wait(lambda: any(map(is_generating, serving(engines))))
            assert httpx.post(engines, json={"count": 3}).status_code == 200
            run.wait(lambda: len(serving(engines)) == 3)
            for _ in range(num_preemptions):
                preempt(run, engines, chance)
            assert httpx.post(engines, json={"count": 1}).status_code == 200
            run.wait(lambda: len(serving(engines)) == 1)
            # The last rollouts are those of one engine. The signal ends the run after a whole rollout.
            trained = run.num_trained()
            run.wait(lambda: run.num_trained() > trained)
            run.process.send_signal(signal.SIGINT)
            run.process.wait(_LIMIT_S)
            text = run.text()
        ledger = io.StringIO()
        status = examine_ledger(output / "run", ledger)
        numbers = range(run.num_trained())
        dumps = [torch.load(output / "dump" / f"{i}.pt", weights_only=True)["samples"] for i in numbers]
        assert versions_of(dumps) == [{rollout_id} for rollout_id in numbers], versions_of(dumps)
        ready = [float(found) for found in re.findall(r"serves, ([\d.]+) s after it had started", text)]
        left = [float(found) for found in re.findall(r"has left, ([\d.]+) s after", text)]
        continued = sum(len(sample["weight_versions"]) > 1 for dump in dumps for sample in dump)
        return {
            "seed": seed,
            "ledger": ledger.getvalue().strip().splitlines()[-1],
            "is_clean": status == 0,
            "rollouts": len(dumps),
            "deaths": text.count("its process ended"),
            "ready_s": ready,
            "left_s": left,
            "continued": continued,
        }


def page_part(runs: Sequence[Mapping[str, Any]], num_preemptions: int) -> str:
    lines = [f"One to three to one engines and {num_preemptions} random preemptions in each run:", ""]
    titles = (
        "seed",
        "rollouts",
        "ledger",
        "samples that another engine continued",
        "engines that died instead of leaving",
    )
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for run in runs:
        cells = (run["seed"], run["rollouts"], run["ledger"], run["continued"], run["deaths"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    ready, left = (sorted(s for run in runs for s in run[key]) for key in ("ready_s", "left_s"))
    lines += ["", f"* An engine that leaves: from SIGTERM or the request to the end of its requests, {_spread(left)}."]
    lines.append(f"* An engine that joins: until it serves, after its start, {_spread(ready)}.")
    return "\n".join(lines)


def _spread(seconds: Sequence[float]) -> str:
    """``seconds`` are sorted."""
    if not seconds:
        return "none was seen"
    return f"median {statistics.median(seconds):.1f} s, longest {seconds[-1]:.1f} s ({len(seconds)} times)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preemptions", type=int, default=5, help="number of SIGTERMs")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs")
    parser.add_argument("--seed", type=int, default=0, help="of engines and moments of the first run")
    parser.add_argument("--rollouts", type=int, default=1000, help="the run ends earlier, after the last change")
    parser.add_argument("--write", action="store_true", help="write the figures into docs/reliability.md")
    options = parser.parse_args()
    runs = []
    for seed in range(options.seed, options.seed + options.seeds):
        runs.append(measure(options.preemptions, seed, options.rollouts))
        print(runs[-1], flush=True)
    part = page_part(runs, options.preemptions)
    print(part)
    if options.write:
        PAGE.write_text(with_part(PAGE.name, PAGE.read_text(encoding="utf-8"), _MARKS, part), encoding="utf-8")
    return int(not all(run["is_clean"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
