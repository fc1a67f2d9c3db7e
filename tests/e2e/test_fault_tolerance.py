"""Engines that die in the middle of a rollout: the run goes on, loses nothing, and the engine serves again."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.e2e.running import PLUGINS, Finished, metrics, start_train, values

ROLLOUTS = 5


def flags_for(task, output: Path, *more: Any) -> list[Any]:
    """Rollouts of a few seconds, long enough to be hit in their middle."""
    return [
        *("--hf-checkpoint", task.model, "--prompt-data", task.train, "--label-key", "label", "--apply-chat-template"),
        *("--rollout-batch-size", 8, "--n-samples-per-prompt", 8, "--rollout-max-response-len", 160),
        *("--rollout-shuffle", "--custom-rm-path", f"{PLUGINS}:share_of_sevens"),
        *("--fp32", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096),
        *("--actor-num-gpus-per-node", 1, "--num-rollout", ROLLOUTS),
        *("--sglang-context-length", 256, "--sglang-max-total-tokens", 16384, "--lr", "1e-4"),
        *("--check-weight-update-equal", "--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt"),
        *("--use-fault-tolerance", "--rollout-health-check-interval", 1, "--rollout-health-check-timeout", 2),
        *("--output-dir", output, "--experiment-name", "run"),
        *more,
    ]


@dataclass
class Running:
    """A run that is under way, as its user sees it: a log, metrics, and ports."""

    process: Any
    mark: str
    output: Path
    log: Path
    timeout_s: float = 150.0
    started: float = field(default_factory=time.monotonic)
    versions: list[set[str]] = field(default_factory=list)

    def text(self) -> str:
        return self.log.read_text()

    def wait(self, ready: Callable[[], Any]) -> Any:
        while not (found := ready()):
            assert self.process.poll() is None, self.text()[-6000:]
            assert time.monotonic() < self.started + self.timeout_s, self.text()[-6000:]
            time.sleep(0.05)
        return found

    def urls(self) -> list[str]:
        line = self.wait(lambda: re.search(r"router (http\S+), engines (.+)", self.text()))
        return [line[1], *re.findall(r"http://[\d.]+:\d+", line[2])]

    def last_url(self, rank: int) -> str:
        return re.findall(rf"engine {rank} started again at (http://[\d.]+:\d+)", self.text())[-1]

    def num_trained(self) -> int:
        path = self.output / "run" / "metrics.jsonl"
        return len(values(metrics(self.output / "run"), "train/loss")) if path.exists() else 0

    def end(self) -> Finished:
        status = self.process.wait(self.timeout_s)
        return Finished(status, self.text(), self.mark, time.monotonic() - self.started)


@contextmanager
def running(flags: list[Any], output: Path, script: str = "train.py") -> Iterator[Running]:
    log = output / "log"
    process, mark = start_train(flags, output, log, script)
    try:
        yield Running(process, mark, output, log)
    finally:
        process.kill()


def read(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return json.load(reply)
    except OSError:
        return None


def is_generating(engine: str) -> bool:
    loads = read(f"{engine}/v1/loads?include=core")
    return loads is not None and sum(load["num_running_reqs"] for load in loads["loads"]) > 0


def server_of(engine: str) -> psutil.Process:
    """The process that listens on the engine's port."""
    port = urlsplit(engine).port
    owners = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == psutil.CONN_LISTEN}
    return psutil.Process(min(owners))


def scheduler_of(engine: str) -> psutil.Process:
    return next(child for child in server_of(engine).children() if child.name().startswith("sglang::sched"))


def check_nothing_was_lost(run: Running, finished: Finished) -> None:
    """Every prompt in order and once, every sample whole, every token from weights that the loop had sent."""
    import torch

    assert finished.status == 0, finished.output[-6000:]
    dumps = [torch.load(run.output / "dump" / f"{i}.pt", weights_only=True)["samples"] for i in range(ROLLOUTS)]
    groups = [sorted({sample["group_index"] for sample in dump}) for dump in dumps]
    assert [index for group in groups for index in group] == list(range(ROLLOUTS * 8))
    assert all(len(dump) == 64 for dump in dumps)
    assert {sample["status"] for dump in dumps for sample in dump} <= {"completed", "truncated"}
    differences = values(metrics(run.output / "run"), "train/train_rollout_logprob_abs_diff")
    assert len(differences) == ROLLOUTS
    run.versions = [{version for sample in dump for version in sample["weight_versions"]} for dump in dumps]
    assert finished.survivors() == []


def seconds_to_recovery(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"serves again, ([\d.]+) s after", output)]


def test_engines_that_die_during_rollouts_serve_again_and_nothing_is_lost(tiny_task, tmp_path):
    with running(flags_for(tiny_task, tmp_path, "--rollout-num-gpus", 2), tmp_path) as run:
        router, first, second = run.urls()
        run.wait(lambda: run.num_trained() >= 1 and is_generating(first) and is_generating(second))
        server_of(second).kill()  # one of two: the rollout ends on the other one
        run.wait(lambda: "engine 1 serves again" in run.text())
        second = run.last_url(1)
        assert {worker["url"] for worker in read(f"{router}/workers")["workers"]} == {first, second}
        done = run.num_trained()
        run.wait(lambda: run.num_trained() > done and is_generating(first) and is_generating(second))
        for engine in (first, second):  # both: the rollout waits until one serves
            scheduler_of(engine).kill()
        finished = run.end()
    check_nothing_was_lost(run, finished)
    seconds = seconds_to_recovery(finished.output)
    print(f"\nseconds from noticing a death to serving again: {seconds}")
    assert finished.output.count("its process ended") == 3
    assert len(seconds) >= 2, "one of the last two may come back only after the run"
    assert run.versions == [{str(i)} for i in range(ROLLOUTS)]
    assert max(values(metrics(tmp_path / "run"), "train/train_rollout_logprob_abs_diff")) < 1e-4


def test_an_asynchronous_run_outlives_its_only_engine(tiny_task, tmp_path):
    flags = flags_for(tiny_task, tmp_path, "--rollout-num-gpus", 1)
    with running(flags, tmp_path, "train_async.py") as run:
        _, engine = run.urls()
        run.wait(lambda: run.num_trained() >= 1 and is_generating(engine))
        server_of(engine).kill()
        finished = run.end()
    check_nothing_was_lost(run, finished)
    seconds = seconds_to_recovery(finished.output)
    print(f"\nseconds from noticing the death to serving again: {seconds}")
    assert len(seconds) == 1, finished.output[-6000:]
