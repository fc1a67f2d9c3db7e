"""The tools around profiles: whom they ask, and whose time they count."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tools.analyze_profile import by_name, own_times

TOOLS = Path(__file__).parents[3] / "tools"


def run_tool(name: str, *words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def operator(name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def test_an_operator_is_charged_for_its_own_time_only() -> None:
    events = [
        operator("outer", 0, 100),
        operator("inner", 10, 30),
        operator("leaf", 15, 5),
        operator("inner", 50, 20),
        operator("next", 100, 7),
        operator("outer", 0, 50, tid=2),
    ]
    times = by_name(own_times(events))
    microseconds = {name: (round(seconds * 1e6), calls) for name, (seconds, calls) in times.items()}
    assert microseconds == {"outer": (100, 2), "inner": (45, 2), "leaf": (5, 1), "next": (7, 1)}


def test_kernels_count_where_there_are_some_and_ranks_are_chosen(tmp_path: Path) -> None:
    for rank in (0, 1):
        kernel = {"ph": "X", "cat": "kernel", "name": f"gemm{rank}", "ts": 0, "dur": 3e6, "pid": 0, "tid": 7}
        with gzip.open(tmp_path / f"train_actor_rank_{rank}.1.pt.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": [kernel, operator("aten::mm", 0, 9e6), {"ph": "M"}]}, file)
    one = run_tool("analyze_profile.py", "--profile-dir", tmp_path, "--rank", 1)
    assert "gemm1" in one.stdout
    assert "gemm0" not in one.stdout
    assert "aten::mm" not in one.stdout
    assert "3.0000  100.0%       1" in one.stdout
    everything = run_tool("analyze_profile.py", "--profile-dir", tmp_path, "--all-ranks")
    assert "gemm0" in everything.stdout
    nothing = run_tool("analyze_profile.py", "--profile-dir", tmp_path, "--rank", 5)
    assert (nothing.returncode, "of rank 5" in nothing.stderr) == (1, True)


def test_every_engine_of_the_router_is_asked() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"workers": [{"url": url}, {"url": url}]})

        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self._send({})

        def _send(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started = run_tool(
            "profile_rollout.py", "--router-url", url, "--output-dir", "/p", "--activities", "GPU", "CPU"
        )
        stopped = run_tool("profile_rollout.py", "--router-url", url + "/", "--action", "stop")
        server.shutdown()
    assert (started.returncode, stopped.returncode) == (0, 0), started.stderr + stopped.stderr
    assert [path for path, _ in asked] == ["/start_profile"] * 2 + ["/stop_profile"] * 2
    body = asked[0][1]
    assert (body["output_dir"], body["num_steps"], body["activities"]) == ("/p", 3, ["GPU", "CPU"])


def test_a_router_that_does_not_answer_is_one_line() -> None:
    with socket.socket() as taken:  # bound without a listener
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        tried = run_tool("profile_rollout.py", "--router-url", url)
    assert (tried.returncode, tried.stdout) == (1, "")
    assert tried.stderr.startswith(f"--router-url {url}: ConnectError: ")
    assert "Traceback" not in tried.stderr
