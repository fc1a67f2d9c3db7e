"""Small inputs for users' functions (groups of samples, a data source), and HTTP servers that replace engines.

``compact_generate`` returns several samples per execution, for tests of fan-out that name functions by path
(``slime.rollout._fanout_test_helpers.compact_generate``). A reward normalization matches it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from slime.data.engine_fields import SAMPLING_MASK
from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.rollout.failures import fresh_copy

NUM_GROUPS = 2
GROUP_SIZE = 2
QUESTION = Sample(prompt="What is 2 + 2?", label="4")
_MAX_OUTPUT_TOKENS = 8
_POLL_S = 0.02  # shutdown() waits for one poll, which is 0.5 s by default


def fresh_groups(row: Sample = QUESTION, count: int = NUM_GROUPS, first: int = 0) -> list[SampleGroup]:
    """Groups before generation, with prompt, label and metadata of ``row``."""
    groups: list[SampleGroup] = []
    for number in range(first, first + count):
        group: SampleGroup = [fresh_copy(row) for _ in range(GROUP_SIZE)]
        for position, sample in enumerate(iter_samples(group)):
            sample.index, sample.group_index = number * GROUP_SIZE + position, number
        groups.append(group)
    return groups


def finished_groups(reward_key: str | None, with_reward: bool = True) -> list[SampleGroup]:
    """Make groups after generation. Rewards differ in the first group and are equal in the second."""
    groups = fresh_groups()
    for number, group in enumerate(groups):
        for position, sample in enumerate(iter_samples(group)):
            sample.tokens = [5, 6, 7, 8, 9]
            sample.response_length = 2
            sample.response = "4"
            sample.loss_mask = [1, 1]
            sample.rollout_log_probs = [-0.5, -0.25]
            sample.weight_versions = ["1"]
            sample.status = Sample.Status.COMPLETED
            if with_reward:
                value = float(number == 0 and position == 0)
                sample.reward = {reward_key: value} if reward_key else value
    return groups


class PromptList:
    """An endless data source that keeps the samples it gets back."""

    def __init__(self, row: Sample) -> None:
        self.row = row
        self.num_drawn = 0
        self.returned: list[SampleGroup] = []

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        groups = fresh_groups(self.row, num_samples, self.num_drawn)
        self.num_drawn += num_samples
        return groups

    def add_samples(self, samples: list[SampleGroup]) -> None:
        self.returned += samples

    def save(self, rollout_id: int) -> None:
        pass

    def load(self, rollout_id: int | None = None) -> None:
        pass

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        pass

    def get_metadata(self) -> dict[str, Any]:
        return {}

    def __len__(self) -> int:
        return 1_000_000


@contextmanager
def serving(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """Serve ``/generate`` inside the block. Yields (host, port).

    Args:
        answer: payload of a request -> reply. A ``ValueError`` becomes status 400 with its message.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = f"http://127.0.0.1:{self.connection.getsockname()[1]}"
            # routers differ in the form of this list: the reply has both
            self._send(200, {"workers": [{"url": url}], "urls": [url]})

        def do_POST(self) -> None:
            payload = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            # health checks, aborts and other calls succeed and do nothing
            if not self.path.startswith("/generate"):
                self._send(200, {})
                return
            try:
                reply = answer(payload)
            except ValueError as error:
                self._send(400, {"error": {"message": str(error)}})
                return
            self._send(200, reply, is_stream=bool(payload.get("stream")))

        def _send(self, status: int, body: dict[str, Any], *, is_stream: bool = False) -> None:
            text = json.dumps(body)
            data = (f"data: {text}\n\ndata: [DONE]\n\n" if is_stream else text).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Write no access log: the caller prints the results."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # HTTP/1.1 keeps connections open: threads that wait for the next request must not block the exit
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="pretended engine", daemon=True).start()
    try:
        yield "127.0.0.1", server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def pretend_engine(tokenizer: Any) -> AbstractContextManager[tuple[str, int]]:
    """Serve replies of a few random ordinary tokens and the end token."""
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(len(tokenizer)) if token not in special]
    # seeded, so that a failure can be repeated
    draw = random.Random(0)
    return serving(lambda body: _reply(body, ids, draw, tokenizer))


def _reply(body: dict[str, Any], ids: list[int], draw: random.Random, tokenizer: Any) -> dict[str, Any]:
    params = body.get("sampling_params") or {}
    room = int(params.get("max_new_tokens") or _MAX_OUTPUT_TOKENS)
    # at least one token, as an engine generates
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
    return {"text": tokenizer.decode(output, skip_special_tokens=skip), "output_ids": output, "meta_info": meta}


MAX_FANOUT = 3
COUNTER_FILE_ENV = "SLIME_FANOUT_TEST_COUNTER_FILE"


async def compact_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Return one generation as ``1 + index % 3`` samples. Appends the index to the file of ``COUNTER_FILE_ENV``."""
    from slime.rollout.sglang_rollout import generate  # the checks of functions need no rollout

    sample = await generate(args, sample, sampling_params)
    index = sample.index or 0
    if path := os.environ.get(COUNTER_FILE_ENV):
        with contextlib.suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{index}\n")
    copies = [copy.deepcopy(sample) for _ in range(1 + index % MAX_FANOUT)]
    for one in copies:
        one.rollout_id = sample.index  # samples of one execution share its id
    return copies


def grpo_normalize_by_group_index(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards minus the mean of their group). All samples have the same weight."""
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    normalized = list(raw)
    for group in {sample.group_index for sample in samples}:
        members = [i for i, sample in enumerate(samples) if sample.group_index == group]
        values = torch.tensor([raw[i] for i in members])
        centered = values - values.mean()
        if args.grpo_std_normalization and len(members) > 1:  # std() of one value is NaN
            centered = centered / (values.std() + 1e-6)
        for i, value in zip(members, centered.tolist(), strict=True):
            normalized[i] = value
    return raw, normalized
