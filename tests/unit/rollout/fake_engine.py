"""An HTTP server that replaces router and engine at once, for faults that the real ones cannot produce on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from slime.data.arguments import BatchSizeArgs, PromptDataArgs
from slime.rollout.arguments import EvalArgs, FilterArgs, GenerationArgs, RewardModelArgs

Reply = tuple[int, Any]


def completion(payload: dict[str, Any], ids: list[int], reason: str = "stop", text: str = "7") -> dict[str, Any]:
    """A reply in SGLang's format. The log-prob of the i-th token is -(i + 1) / 10."""
    return {
        "text": text,
        "output_ids": ids,
        "meta_info": {
            "id": payload.get("rid", ""),
            "finish_reason": {"type": reason},
            "prompt_tokens": len(payload.get("input_ids", ())),
            "completion_tokens": len(ids),
            "cached_tokens": 1,
            "weight_version": "3",
            "output_token_logprobs": [[-(i + 1) / 10, token, None] for i, token in enumerate(ids)],
        },
    }


class FakeEngine:
    """``on_generate(payload, number) -> (status, reply)`` answers the number-th generation request."""

    def __init__(self, on_generate: Callable[[dict[str, Any], int], Reply] | None = None) -> None:
        self.on_generate = on_generate or (lambda payload, number: (200, completion(payload, [5, 6])))
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts: list[dict[str, Any]] = []
        self.aborted = threading.Event()
        self.disconnected = threading.Event()
        self.running = 0
        self.most_running = 0
        self.lock = threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._answer(200, {"workers": engine.workers})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/abort_request":
                    engine.aborts.append(body)
                    engine.aborted.set()
                    self._answer(200, "")
                    return
                with engine.lock:
                    engine.requests.append(body)
                    engine.headers.append({name.lower(): value for name, value in self.headers.items()})
                    number = len(engine.requests) - 1
                    engine.running += 1
                    engine.most_running = max(engine.most_running, engine.running)
                try:
                    reply = engine.on_generate(body, number)
                finally:
                    with engine.lock:
                        engine.running -= 1
                if isinstance(reply[1], Iterator):
                    self._stream(reply[1])
                else:
                    self._answer(*reply)

            def _stream(self, events: Iterator[Any]) -> None:
                """Server-sent events: JSON values, or bytes as they are. One that raises breaks off."""
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    for event in events:
                        line = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    self.wfile.write(b"0\r\n\r\n")
                except (BrokenPipeError, ConnectionResetError):
                    engine.disconnected.set()
                except ConnectionAbortedError:
                    self.close_connection = True

            def _answer(self, status: int, reply: Any) -> None:
                data = json.dumps(reply).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the client gave up, as some tests want

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.workers: list[dict[str, Any]] = [{"url": self.url}]  # as a router lists them
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.aborted.set()
        self.server.shutdown()
        self.server.server_close()


def make_args(hf_checkpoint: str, port: int, **values: Any) -> SimpleNamespace:
    """Every flag at its default, then ``values``."""
    merged: dict[str, Any] = {}
    for group in (GenerationArgs, RewardModelArgs, FilterArgs, EvalArgs, PromptDataArgs, BatchSizeArgs):
        merged |= vars(group())
    merged |= {
        "hf_checkpoint": hf_checkpoint,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": port,
        "sglang_server_concurrency": 64,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "rollout_max_response_len": 8,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_request_timeout": 10.0,
        "rm_timeout": 5.0,
        "rm_type": "random",
        "save": None,
        "load": None,
        "eval_datasets": [],
    }
    return SimpleNamespace(**(merged | values))
