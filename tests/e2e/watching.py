"""A run that is under way, as its user sees it, and the processes of its engines."""

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

import httpx
import psutil

from tests.e2e.running import Finished, everything, exit_status, metrics, start_train, values
from tests.limits import Limit


@dataclass
class Running:
    """A run that is under way, as its user sees it: a log, metrics, and ports."""

    process: Any
    mark: str
    output: Path
    log: Path
    limit: Limit = field(default_factory=lambda: Limit(150.0))
    versions: list[set[str]] = field(default_factory=list)

    def text(self) -> str:
        return everything(self.log, self.output / "run" / "run.log")

    def wait(self, ready: Callable[[], Any]) -> Any:
        while not (found := ready()):
            assert self.process.poll() is None, self.text()[-6000:]
            assert not self.limit.is_over, self.text()[-6000:]
            time.sleep(0.05)
        return found

    def urls(self) -> list[str]:
        line = self.wait(lambda: re.search(r"router (http\S+), engines (.+)", self.text()))
        return [line[1], *re.findall(r"http://[\d.]+:\d+", line[2])]

    def urls_of(self, model: str) -> list[str]:
        """Engines of a model whose weights stay."""
        line = self.wait(lambda: re.search(rf"engines of {model}, whose weights stay (.+)", self.text()))
        return re.findall(r"http://[\d.]+:\d+", line[1])

    def last_url(self, rank: int) -> str:
        return re.findall(rf"engine {rank} started again at (http://[\d.]+:\d+)", self.text())[-1]

    def num_trained(self) -> int:
        path = self.output / "run" / "metrics.jsonl"
        return len(values(metrics(self.output / "run"), "train/loss")) if path.exists() else 0

    def end(self) -> Finished:
        return Finished(exit_status(self.process, self.log), self.text(), self.mark)


@contextmanager
def running(flags: list[Any], output: Path, script: str = "train.py", **variables: str) -> Iterator[Running]:
    log = output / "log"
    process, mark = start_train(flags, output, log, script, **variables)
    try:
        yield Running(process, mark, output, log)
    finally:
        process.kill()


def read(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return json.load(reply)
    except OSError:
        return None


def read_engines_url(output: Path) -> str | None:
    """Address of ``--engines-port``, once the run has it."""
    return json.loads((output / "run" / "progress.json").read_text()).get("engines_url")


def serving(engines: str) -> list[str]:
    """Urls of the engines that serve, by number. None if the run does not answer: it is busy, or it has ended."""
    found = read(engines) or {"engines": []}
    return [engine["url"] for engine in found["engines"] if engine["state"] == "serving"]


def is_generating(engine: str) -> bool:
    loads = read(f"{engine}/v1/loads?include=core")
    return loads is not None and sum(load["num_running_reqs"] for load in loads["loads"]) > 0


def freeze(engine: str) -> bool:
    """Pause the engine in the middle of its requests. False, and not paused, if they are already done."""
    if is_generating(engine):
        httpx.post(f"{engine}/pause_generation", json={"mode": "in_place"}, timeout=60).raise_for_status()
        # A paused engine publishes no new load: only a refused flush proves that requests are left.
        if httpx.post(f"{engine}/flush_cache", timeout=60).status_code == 400 and is_generating(engine):
            return True
        thaw(engine)
    return False


def thaw(engine: str) -> None:
    httpx.post(f"{engine}/continue_generation", json={}, timeout=60).raise_for_status()


def server_of(engine: str) -> psutil.Process:
    """The process that listens on the engine's port."""
    port = urlsplit(engine).port
    owners = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == psutil.CONN_LISTEN}
    return psutil.Process(min(owners))


def scheduler_of(engine: str) -> psutil.Process:
    return next(child for child in server_of(engine).children() if child.name().startswith("sglang::sched"))


def scheduler_on_second_node(engine: str) -> psutil.Process:
    """The scheduler of a run's only engine on the second of two nodes, which are simulated on this host."""
    servers = server_of(engine).parent().children()  # of the preloading process
    schedulers = (child for server in servers for child in server.children())
    return next(child for child in schedulers if child.name() == "sglang::scheduler_TP1")
