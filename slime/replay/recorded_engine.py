"""An engine that answers with what was recorded: a request that asks for what comes next gets it, token by token equal.

A request whose ids are the beginning of the recorded sample is answered with the tokens that follow there, up to the
next ones that the model did not write. A request made of text is answered in the order of the recording. A request that
fits nowhere is refused with the place where it departs: the code is not what it was, or a tool answered differently.

Runs on a thread of the replaying process, on loopback.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from slime.data.sample import Sample
from slime.data.sampling_mask import SAMPLING_MASK

__all__ = ["Recording", "serving"]


@dataclass(frozen=True)
class _Turn:
    """Response tokens ``[start, end)`` that one request wrote, counted from the begin of the sample."""

    start: int
    end: int


class Recording:
    """The turns of one sample.

    Args:
        tokenizer: makes the texts of the answers.
    """

    def __init__(self, sample: Sample, tokenizer: Any) -> None:
        self._sample = sample
        self._tokenizer = tokenizer
        self._turns = list(_turns(sample))
        self.num_answered = 0

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            ValueError: the request is not in the recording.
        """
        ids = payload.get("input_ids")
        turn = self._next_in_order() if ids is None else self._after(ids)
        self.num_answered += 1
        return self._reply(turn, len(ids) if ids is not None else turn.start)

    def _next_in_order(self) -> _Turn:
        if self.num_answered >= len(self._turns):
            raise ValueError(f"request {self.num_answered + 1}: the recording has {len(self._turns)} turns")
        return self._turns[self.num_answered]

    def _after(self, ids: Sequence[int]) -> _Turn:
        recorded = self._sample.tokens
        pairs = enumerate(itertools.zip_longest(ids, recorded[: len(ids)]))
        apart = next((place for place, (asked, known) in pairs if asked != known), None)
        if apart is not None:
            known = recorded[apart] if apart < len(recorded) else "the end"
            raise ValueError(
                f"request {self.num_answered + 1} departs from the recording at token {apart}: it has {ids[apart]}, "
                f"recorded is {known}. The prompt, the template, a tool or the code is not what it was."
            )
        turn = next((turn for turn in self._turns if turn.start <= len(ids) < turn.end), None)
        if turn is None:
            raise ValueError(f"request {self.num_answered + 1}: after token {len(ids)} the model wrote nothing then")
        return _Turn(len(ids), turn.end)

    def _reply(self, turn: _Turn, num_prompt: int) -> dict[str, Any]:
        sample = self._sample
        ids = sample.tokens[turn.start : turn.end]
        begin = len(sample.tokens) - sample.response_length
        log_probs = (sample.rollout_log_probs or [0.0] * sample.response_length)[turn.start - begin : turn.end - begin]
        was_cut = turn.end == len(sample.tokens) and sample.status is Sample.Status.TRUNCATED
        versions = sample.weight_versions
        meta: dict[str, Any] = {
            "id": f"replay-{self.num_answered}",
            "finish_reason": {"type": "length" if was_cut else "stop"},
            "prompt_tokens": num_prompt,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "output_token_logprobs": [[p, token, None] for p, token in zip(log_probs, ids, strict=True)],
        }
        if sample.rollout_top_p_token_offsets is not None:
            sets, offsets = list(sample.rollout_top_p_token_ids), list(sample.rollout_top_p_token_offsets)
            borders = itertools.pairwise(offsets[turn.start - begin : turn.end - begin + 1])
            meta[SAMPLING_MASK] = [[int(token) for token in sets[a:b]] for a, b in borders]
        if versions:
            meta["weight_version"] = versions[min(self.num_answered, len(versions)) - 1]
        return {"text": self._tokenizer.decode(ids, skip_special_tokens=False), "output_ids": ids, "meta_info": meta}


def _turns(sample: Sample) -> Iterator[_Turn]:
    """Stretches of trained tokens: what lies between was put there by somebody else."""
    place = len(sample.tokens) - sample.response_length
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    for is_own, stretch in itertools.groupby(mask):
        length = len(list(stretch))
        if is_own:
            yield _Turn(place, place + length)
        place += length


@contextmanager
def serving(recording: Recording) -> Iterator[tuple[str, int]]:
    """Answer requests inside the block. Yields (host, port) of what stands for router and engines."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = f"http://127.0.0.1:{self.connection.getsockname()[1]}"
            self._send(200, {"workers": [{"url": url}], "urls": [url]})

        def do_POST(self) -> None:
            payload = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            if not self.path.startswith("/generate"):
                self._send(200, {})
                return
            try:
                reply = recording.answer(payload)
            except ValueError as error:
                self._send(400, {"error": {"message": f"slime replay: {error}"}})
                return
            self._send(200, reply, is_stream=bool(payload.get("stream")))

        def _send(self, status: int, body: dict[str, Any], is_stream: bool = False) -> None:
            text = json.dumps(body)
            data = (f"data: {text}\n\ndata: [DONE]\n\n" if is_stream else text).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """The replay prints its own lines."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="recorded engine", daemon=True)
    thread.start()
    try:
        yield "127.0.0.1", server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)
