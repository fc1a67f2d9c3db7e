"""Engines that die in the middle of a rollout: the run goes on, loses nothing, and the engine serves again."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e.running import PLUGINS, Finished, metrics, start_train, values

ROLLOUTS = 4


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


def check_nothing_was_lost(run: Running, finished: Finished, rollouts: int = ROLLOUTS) -> None:
    """Every prompt in order and once, every sample whole, every token from the weights that the loop had sent."""
    import torch

    assert finished.status == 0, finished.output[-6000:]
    dumps = [torch.load(run.output / "dump" / f"{i}.pt", weights_only=True)["samples"] for i in range(rollouts)]
    groups = [sorted({sample["group_index"] for sample in dump}) for dump in dumps]
    assert [index for group in groups for index in group] == list(range(rollouts * 8))
    assert all(len(dump) == 64 for dump in dumps)
    for rollout_id, dump in enumerate(dumps):
        assert {sample["status"] for sample in dump} <= {"completed", "truncated"}
        assert {version for sample in dump for version in sample["weight_versions"]} == {str(rollout_id)}
    differences = values(metrics(run.output / "run"), "train/train_rollout_logprob_abs_diff")
    assert len(differences) == rollouts
    assert 0 < max(differences) < 1e-4, differences
    assert finished.survivors() == []


def seconds_to_recovery(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"serves again, ([\d.]+) s after", output)]


@pytest.mark.parametrize(("part", "how"), [("server", signal.SIGKILL), ("scheduler", signal.SIGSTOP)])
def test_one_of_two_engines_dies_during_a_rollout_and_serves_again(part, how, tiny_task, tmp_path):
    with running(flags_for(tiny_task, tmp_path, "--rollout-num-gpus", 2), tmp_path) as run:
        router, first, second = run.urls()
        run.wait(lambda: run.num_trained() >= 1 and is_generating(first) and is_generating(second))
        victim = server_of(second) if part == "server" else scheduler_of(second)
        os.kill(victim.pid, how)
        killed = time.monotonic()
        run.wait(lambda: "engine 1 serves again" in run.text())
        seconds = time.monotonic() - killed
        urls = {worker["url"] for worker in read(f"{router}/workers")["workers"]}
        finished = run.end()
    print(f"\n{part} {how.name}: {seconds:.1f} s until the engine served again {seconds_to_recovery(finished.output)}")
    check_nothing_was_lost(run, finished)
    assert first in urls
    assert second not in urls
    assert len(urls) == 2


def test_a_rollout_waits_for_the_only_engine_to_start_again(tiny_task, tmp_path):
    with running(flags_for(tiny_task, tmp_path, "--rollout-num-gpus", 1), tmp_path) as run:
        _, engine = run.urls()
        run.wait(lambda: run.num_trained() >= 1 and is_generating(engine))
        os.kill(scheduler_of(engine).pid, signal.SIGKILL)
        finished = run.end()
    print(f"\nthe only engine, scheduler SIGKILL: {seconds_to_recovery(finished.output)} s until it served again")
    assert len(seconds_to_recovery(finished.output)) == 1, finished.output[-6000:]
    check_nothing_was_lost(run, finished)
