"""A server that answers ``/generate`` like an engine behind its router, with tokens that mean nothing."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from slime.data.sampling_mask import SAMPLING_MASK

__all__ = ["pretend_engine"]

_MAX_OUTPUT_TOKENS = 8
_POLL_S = 0.02


@contextmanager
def pretend_engine(tokenizer: Any) -> Iterator[int]:
    """Serve on this machine; yields the port. Outputs are a few random ordinary tokens and the end token."""
    ids = [token for token in range(len(tokenizer)) if token not in set(tokenizer.all_special_ids)]
    draw = random.Random(0)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"workers": [{"url": f"http://127.0.0.1:{self.connection.getsockname()[1]}"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            reply = _reply(body, ids, draw, tokenizer) if self.path == "/generate" else {}
            if body.get("stream"):
                self._send("text/event-stream", f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n")
            else:
                self._answer(reply)

        def _answer(self, reply: Any) -> None:
            self._send("application/json", json.dumps(reply))

        def _send(self, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def _reply(body: dict[str, Any], ids: list[int], draw: random.Random, tokenizer: Any) -> dict[str, Any]:
    params = body.get("sampling_params") or {}
    room = int(params.get("max_new_tokens") or _MAX_OUTPUT_TOKENS)
    output = draw.choices(ids, k=max(1, min(_MAX_OUTPUT_TOKENS, room)))
    is_cut = len(output) >= room or tokenizer.eos_token_id is None
    if not is_cut:
        output.append(tokenizer.eos_token_id)
    prompt = body.get("input_ids") or tokenizer.encode(str(body.get("text") or ""))
    skip = bool(params.get("skip_special_tokens", True))
    meta = {
        "id": body.get("rid", ""),
        "finish_reason": {"type": "length" if is_cut else "stop"},
        "prompt_tokens": len(prompt),
        "completion_tokens": len(output),
        "cached_tokens": 0,
        "weight_version": "1",
        "output_token_logprobs": [[-draw.random(), token, None] for token in output],
    }
    if body.get("return_sampling_mask"):
        meta[SAMPLING_MASK] = [[token] for token in output]
    return {
        "text": tokenizer.decode(output, skip_special_tokens=skip),
        "output_ids": output,
        "meta_info": meta,
    }
