"""Pairs of faults, gray failures and kills of a whole run at random moments: a table in docs/reliability.md.

    python benchmarks/chaos_pairs.py [--only TEXT] [--record FILE] [--minutes N] [--write]

pair    one process is killed in a phase, and a moment later another one is killed, or stopped for 15 seconds. The
        pairs are generated from the processes and phases of ``chaos.py``
gray    nothing dies: an engine that is stopped nine tenths of the time, a router of which half of the replies are
        delayed by up to three seconds, a disk of which every flush takes up to a second
kill    SIGKILL of all processes of an asynchronous run in deterministic mode, at a random moment

A command that ends is given again, as by a scheduler. Each case counts the seconds from its last fault until the run
has trained on a rollout that was made afterwards, starts included. In the end the ledger must know of no prompt that
was lost or trained on twice. Each rollout of a synchronous run must have been trained on tokens of its own weights, and
all weights that an asynchronous run has made twice must be equal.

--record keeps the cases whose run ended well. Its cases are not measured again, and --minutes ends the command between
two runs. --write puts the table into the page.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
import torch
from aiohttp import web

from benchmarks.chaos import PAGE, check_ledger, flags_for
from benchmarks.marked_part import with_part
from slime.agent.service import run_app_in_thread
from slime.data.schedule import WEIGHTS
from tests.doc_commands import shown_flags
from tests.e2e.faults import PHASES, PROCESSES, Broken
from tests.e2e.running import Finished, marked, start_train
from tests.e2e.test_fault_tolerance import versions_of
from tests.e2e.test_loop import grpo_flags
from tests.e2e.test_router import router
from tests.limits import Limit
from tools.make_tiny_task import TinyTask, make_tiny_task

_MARKS = ("<!-- pairs: begin -->", "<!-- pairs: end -->")
_SLOW_DISK = Path(__file__).with_name("slow_disk")
_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h
_CASES_OF_A_RUN = 4
_LIMIT_S = 600.0  # of an idle machine, for one case
_MOST_STARTS = 8
_APART_S = 0.5
_STOPPED_S = 15.0  # longer than --heartbeat-timeout
_GRAY_S = 20.0
_DELAYED, _LONGEST_DELAY_S = 0.5, 3.0
_NUM_KILLS = 10
_LATEST_KILL_S = 10.0


@dataclass(frozen=True)
class Case:
    """One case: ``text`` is its kind and its name."""

    text: str
    phase: str = ""
    processes: tuple[str, ...] = ()
    is_stopped: bool = False

    @property
    def kind(self) -> str:
        return self.text.partition(":")[0]


@dataclass
class Measured:
    """
    Attributes:
        text: of the case.
        seconds: from the last fault to the next trained rollout.
        starts: how often the command was given again meanwhile.
        note: what else was found.
    """

    text: str
    seconds: float
    starts: int
    note: str = ""


def all_cases(num_kills: int = _NUM_KILLS) -> list[Case]:
    """Every pair of processes once, in rotating phases and both ways, the gray failures, and the kills."""
    pairs = []
    for number, (first, second) in enumerate(itertools.product(PROCESSES, PROCESSES)):
        # Each process is the second one of killed and of stopped pairs: its place in a row does not decide.
        phase, is_stopped = PHASES[number % len(PHASES)], (number // len(PROCESSES) + number) % 2 == 1
        how = "stopped" if is_stopped else "killed"
        text = f"pair: {first} killed in {phase}, then {second} {how}"
        pairs.append(Case(text, phase, (first, second), is_stopped))
    kills = [Case(f"kill: random moment {number + 1}") for number in range(num_kills)]
    return [*pairs, *map(Case, GRAY), *kills]


@dataclass
class Operated(Broken):
    """A run whose command is given again whenever it ends, as by a scheduler."""

    flags: list[Any] = field(default_factory=list)
    script: str = "train.py"
    variables: dict[str, str] = field(default_factory=dict)
    starts: int = 1

    def wait(self, ready: Callable[[], Any]) -> Any:
        while not (found := ready()):
            assert not self.limit.is_over, self.text()[-6000:]
            if self.process.poll() is not None:
                assert self.process.returncode != 0, f"the run ended before its faults:\n{self.text()[-3000:]}"
                self.again()
            time.sleep(0.01)
        return found

    def again(self) -> None:
        """Start the command again after the last process of the run has ended."""
        survivors = Finished(0, "", self.mark).survivors(within_s=30.0)
        assert not survivors, survivors
        text = self.text()
        self.process, self.mark = start_train(self.flags, self.output, self.log, self.script, **self.variables)
        self.starts += 1
        # as an operator does, who would not repeat a command that cannot work
        assert self.starts <= _MOST_STARTS, text[-6000:]

    def alive(self, what: str) -> list[int]:
        return self.pids(what) if what != "driver" or self.process.poll() is None else []

    def send(self, what: str, how: signal.Signals) -> int:
        """Send a signal to one process of that kind, as soon as there is one. Returns its pid."""
        while True:
            pid = min(self.wait(lambda: self.alive(what)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
                return pid

    def kill_all(self) -> None:
        """SIGKILL of every process at once, as if the machine had gone."""
        while pids := [pid for pid, _ in marked(self.mark)]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Let the run end after its current rollout, and check the ledger."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(300) == 130, self.text()[-6000:]
        check_ledger(self.output)

    @property
    def num_trained(self) -> int:
        return len(list((self.output / "dump").glob("[0-9]*.pt")))


@contextlib.contextmanager
def operated(flags: list[Any], output: Path, script: str = "train.py", **variables: str) -> Iterator[Operated]:
    log = output / "log"
    process, mark = start_train(flags, output, log, script, **variables)
    run = Operated(process, mark, output, log, Limit(_LIMIT_S), flags, script, variables)
    try:
        yield run
    finally:
        run.process.kill()


def measured(run: Operated, case: Case, inject: Callable[[], None]) -> Measured:
    """Inject, and wait for a rollout that was made and trained on afterwards."""
    run.limit = Limit(_LIMIT_S)
    starts = run.starts
    inject()
    at = time.time()
    seconds = run.trained_after(at) - at
    print(f"{case.text}: {seconds:.1f} s, {run.starts - starts} starts", flush=True)
    return Measured(case.text, seconds, run.starts - starts)


def run_flags(task: TinyTask, output: Path, *more: Any) -> list[Any]:
    """A run with every phase and two engines, whose batches are kept for the check of their versions."""
    dump = ("--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt")
    return flags_for(task, output, 1000, "--use-fault-tolerance", "--rollout-num-gpus", 2, *dump, *more)


def check_versions(output: Path) -> None:
    """Synchronous runs: every token of a rollout was made by the weights of that rollout."""
    dumps = sorted((output / "dump").glob("[0-9]*.pt"), key=lambda path: int(path.stem))
    samples = [torch.load(path, weights_only=True)["samples"] for path in dumps]
    assert versions_of(samples) == [{int(path.stem)} for path in dumps], versions_of(samples)


# ---------------------------------------------------------------- pairs


def measure_pairs(task: TinyTask, output: Path, cases: Sequence[Case]) -> list[Measured]:
    found = []
    with operated(run_flags(task, output), output) as run:
        for case in cases:
            found.append(measured(run, case, lambda case=case: inject_pair(run, case)))  # type: ignore[misc]
        run.end()
    check_versions(output)
    return found


def inject_pair(run: Operated, case: Case) -> None:
    first, second = case.processes
    reached = run.num_trained
    run.wait(lambda: run.is_in(case.phase, reached))
    run.send(first, signal.SIGKILL)
    time.sleep(_APART_S)
    pid = run.send(second, signal.SIGSTOP if case.is_stopped else signal.SIGKILL)
    if case.is_stopped:
        timer = threading.Timer(_STOPPED_S, lambda: _continue(pid))
        timer.daemon = True
        timer.start()


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------- gray failures


def slow_engine(task: TinyTask, output: Path, case: Case) -> Measured:
    """The engine's scheduler is stopped nine tenths of the time."""

    def inject() -> None:
        run.wait(lambda: run.is_in("generate", 1))
        pid = min(run.wait(lambda: run.alive("engine")))
        limit = time.monotonic() + _GRAY_S
        with contextlib.suppress(ProcessLookupError):  # a health check may have replaced it
            while time.monotonic() < limit:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.9)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.1)

    with operated(run_flags(task, output), output) as run:
        found = measured(run, case, inject)
        run.end()
    check_versions(output)
    return found


def delayed_replies(task: TinyTask, output: Path, case: Case) -> Measured:
    """A proxy in front of the run's router delays half of the replies."""
    existing = router(None, output / "router-log", "--router-policy", "round_robin")
    counts = [0, 0]
    proxy = run_app_in_thread(proxy_of(existing.url, counts))
    address = ("--sglang-router-ip", "127.0.0.1", "--sglang-router-port", proxy.port)
    try:
        existing.wait_ready()
        with operated(run_flags(task, output, *address), output) as run:
            found = measured(run, case, lambda: run.wait(lambda: run.is_in("generate", 1)))
            run.end()
    finally:
        proxy.stop()
        existing.stop()
    check_versions(output)
    assert counts[1] > 0, "no reply was delayed"
    found.note = f"{counts[1]} of {counts[0]} replies delayed"
    return found


def proxy_of(url: str, counts: list[int]) -> web.Application:
    """An app that forwards to ``url``. ``counts``: replies to generation requests, and the delayed ones of them."""

    async def forward(request: web.Request) -> web.Response:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            reply = await client.request(
                request.method,
                f"{url}{request.path_qs}",
                content=await request.read(),
                headers={"Content-Type": request.content_type},
            )
        if request.path == "/generate":
            counts[0] += 1
            if random.random() < _DELAYED:
                counts[1] += 1
                await asyncio.sleep(random.uniform(0.0, _LONGEST_DELAY_S))
        return web.Response(status=reply.status_code, body=reply.content, content_type="application/json")

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


def slow_disk(task: TinyTask, output: Path, case: Case) -> Measured:
    """Flushes and renames of all processes are slow."""
    log = output / "slow-disk"
    with operated(run_flags(task, output), output, **slow_disk_variables(log)) as run:
        found = measured(run, case, lambda: run.wait(lambda: run.is_in("generate", 1)))
        run.end()
    check_versions(output)
    lines = log.read_text(encoding="utf-8").splitlines()
    pids = {line.split()[0] for line in lines}
    assert len(pids) > 2, "trainer, Data Buffer and driver write"
    found.note = f"{len(lines)} slow operations in {len(pids)} processes"
    return found


def slow_disk_variables(log: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{Path(__file__).parents[1]}:{_SLOW_DISK}", "SLOW_DISK_LOG": str(log)}


GRAY = {
    "gray: an engine that answers slowly": slow_engine,
    "gray: half of the replies delayed": delayed_replies,
    "gray: a slow disk": slow_disk,
}


def measure_gray(task: TinyTask, output: Path, cases: Sequence[Case]) -> list[Measured]:
    found = []
    for number, case in enumerate(cases):
        folder = output / str(number)
        folder.mkdir()
        found.append(GRAY[case.text](task, folder, case))
    return found


# ---------------------------------------------------------------- kills of the whole run


def measure_kills(task: TinyTask, output: Path, cases: Sequence[Case]) -> list[Measured]:
    exact = shown_flags("docs/reproducibility.md", "--deterministic-mode")
    flags = grpo_flags(
        *(task, output, *exact, "--async-buffer-size", 2, "--num-rollout", 1000),
        *("--save", output / "checkpoints", "--load", output / "checkpoints", "--save-interval", 3),
    )
    chance = random.Random(cases[0].text)
    with operated(flags, output, "train_async.py") as run:
        found = [measured(run, case, lambda: _kill_somewhere(run, chance)) for case in cases]
        run.end()
    note = f"{check_history(output)} versions made twice, all equal"
    return [replace(each, note=note) for each in found]


def _kill_somewhere(run: Operated, chance: random.Random) -> None:
    started = time.time()
    if chance.random() < 0.75:  # else during the start
        run.trained_after(started)
    time.sleep(chance.uniform(0.0, _LATEST_KILL_S))
    run.kill_all()


def check_history(output: Path) -> int:
    """Compare the hashes of every version of the weights. Returns the number of versions that were made twice."""
    hashes: dict[int, list[str]] = {}
    for line in map(json.loads, (output / "checkpoints" / "rollout" / WEIGHTS).read_text().splitlines()):
        if "hash" in line:
            hashes.setdefault(line["version"], []).append(line["hash"])
    assert all(len(set(found)) == 1 for found in hashes.values()), hashes
    return sum(len(found) > 1 for found in hashes.values())


# ---------------------------------------------------------------- the table

KINDS = {"pair": measure_pairs, "gray": measure_gray, "kill": measure_kills}


def page_part(cases: Sequence[Case], found: Sequence[Measured]) -> str:
    lines = [
        f"{len(found)} of {len(cases)} cases were measured. In all of them the law was kept.",
        "",
        "| case | seconds to the next trained rollout | commands given again | |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {e.text} | {e.seconds:.0f} | {e.starts} | {e.note} |" for e in found)])


def read_record(record: Path) -> list[Measured]:
    if not record.exists():
        return []
    return [Measured(**json.loads(line)) for line in record.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the cases whose text contains this, such as 'gray:'")
    parser.add_argument("--record", type=Path, default=Path("outputs/chaos_pairs.jsonl"), help="file of the cases")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further run after that time")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reliability.md")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the blocks that end the run's processes must run
    end = time.monotonic() + 60 * options.minutes
    cases, found = all_cases(), read_record(options.record)
    options.record.parent.mkdir(parents=True, exist_ok=True)
    known = {each.text for each in found}
    for kind, measure in KINDS.items():
        todo = [case for case in cases if case.kind == kind and options.only in case.text and case.text not in known]
        for part in (todo[i : i + _CASES_OF_A_RUN] for i in range(0, len(todo), _CASES_OF_A_RUN)):
            if time.monotonic() >= end:
                break
            with tempfile.TemporaryDirectory(dir="/tmp") as folder:
                new = measure(make_tiny_task(Path(folder) / "task"), Path(folder), part)
            found += new
            with options.record.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(each)) + "\n" for each in new)
    text = page_part(cases, found)
    print(text)
    if options.write:
        page = with_part(PAGE.name, PAGE.read_text(encoding="utf-8"), _MARKS, text)
        PAGE.write_text(page, encoding="utf-8")
    return 0 if len(found) == len(cases) else _TRY_AGAIN


if __name__ == "__main__":
    sys.exit(main())
