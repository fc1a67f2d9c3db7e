"""Response times of the board for a run of 200 rollouts with 256 samples each, and its picture for the docs.

    python benchmarks/board.py [--rollouts 200] [--samples 256] [--picture docs/images/board.png]

Prints the size of the page, the time of each request, and the time until the overview is drawn in a headless Chromium,
if one is installed. Bound: the first paint takes less than a second.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.browser import Browser, find_chromium
from benchmarks.made_run import make_run
from slime.board.runs import Runs
from slime.board.server import STATIC, make_app
from tools.make_tiny_task import make_tiny_task

BOUND_S = 1.0
PAGE_FILES = ("", *(f"static/{path.name}" for path in STATIC.iterdir() if path.name != "index.html"))


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The board of a run, or of a folder of runs, on a free port of loopback."""
    with socket.socket() as place:
        # Port 0 takes a free one. It is released before the server binds it, which another process may do first.
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(make_app(Runs(folder)), port=port, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def ask(client: httpx.Client, path: str) -> tuple[float, int]:
    """(seconds, bytes on the wire) of a question."""
    started = time.perf_counter()
    reply = client.get(path)
    reply.raise_for_status()
    return time.perf_counter() - started, reply.num_bytes_downloaded


def measure(url: str, num_rollouts: int) -> None:
    last = num_rollouts - 1
    questions = {
        "runs": "/api/runs",
        "run": "/api/run",
        # The first question reads the file, the second one is answered from memory.
        "curves, first time": "/api/metrics",
        "curves": "/api/metrics",
        "samples of the last rollout": f"/api/samples?rollout={last}",
        "samples of all rollouts, first time": "/api/samples?min_reward=1&status=completed&order=response_length",
        "samples of all rollouts, filtered": "/api/samples?min_reward=1&status=completed&order=response_length",
        "text in all samples, first time": "/api/samples?text=85&descending=true&order=reward",
        "text in all samples": "/api/samples?text=85&descending=true&order=reward",
        "one sample": f"/api/sample?kind=rollout&rollout={last}&position=17",
    }
    with httpx.Client(base_url=url, timeout=60.0) as client:
        print(
            f"page: {sum(ask(client, '/' + name)[1] for name in PAGE_FILES) / 1024:.0f} KiB in {len(PAGE_FILES)} files"
        )
        for what, path in questions.items():
            seconds, size = ask(client, path)
            print(f"{what:<38} {seconds * 1000:8.1f} ms {size / 1024:8.1f} KiB")


def seconds_until_painted(url: str) -> float:
    with Browser() as browser:
        return browser.seconds_until_painted(url)


def take_pictures(outputs: Path, path: Path, sample: str) -> None:
    """The pictures of the docs, in light colors."""
    shown = {
        "": ("#overview?run=arithmetic", (1440, 1060)),
        "_runs": ("#overview?run=arithmetic&run=arithmetic-lr3e-6&run=arithmetic-no-kl&smooth=0.8", (1440, 860)),
        "_sample": (f"#sample/{sample}?run=arithmetic", (1440, 800)),
    }
    with serving(outputs) as url, Browser() as browser:
        for name, (place, size) in shown.items():
            browser.open(f"{url}/{place}", size)
            browser.picture(path.with_stem(path.stem + name))
            print(f"picture: {path.with_stem(path.stem + name)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--picture", type=Path, help="also take pictures of the overview, of two runs, and of a sample")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outputs, model = Path(folder) / "outputs", Path(make_tiny_task(Path(folder) / "task").model)
        started = time.perf_counter()
        run = make_run(
            outputs / "arithmetic", num_rollouts=options.rollouts, num_samples=options.samples, hf_checkpoint=model
        )
        size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        seconds = time.perf_counter() - started
        print(f"{options.rollouts} x {options.samples} samples, {size / 2**20:.0f} MiB, made in {seconds:.0f} s")
        with serving(run) as url:
            measure(url, options.rollouts)
            if find_chromium() is None:
                print("first paint: not measured, there is no chromium")
                return 0
            # Each with a fresh profile, hence without a cache of the browser.
            paint = statistics.median(seconds_until_painted(url) for _ in range(3))
            print(f"first paint: {paint:.2f} s, bound {BOUND_S:g} s")
        if options.picture:
            for name, seed in (("arithmetic-lr3e-6", 1), ("arithmetic-no-kl", 2)):
                make_run(outputs / name, num_rollouts=options.rollouts, num_samples=16, hf_checkpoint=model, seed=seed)
            take_pictures(outputs, options.picture, f"rollout/{options.rollouts - 1}/17")
    return int(paint >= BOUND_S)


if __name__ == "__main__":
    sys.exit(main())
