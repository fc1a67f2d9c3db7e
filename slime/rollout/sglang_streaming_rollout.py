"""Streamed generation: ``--custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming``.

Each event of the engine holds the whole response so far, including the sets of ids that ``--rollout-top-p`` and
``--rollout-top-k`` left of the vocabulary, so the bytes sent grow with the square of the length. With
``--sglang-incremental-streaming-output`` an event holds the new tokens, and this module joins the events. When the
rollout ends, a sample keeps the received tokens. Otherwise the result is that of ``sglang_rollout.generate``.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from itertools import chain
from typing import Any

from slime.data.engine_fields import OUTPUT_LISTS
from slime.data.sample import Sample
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout import sglang_rollout
from slime.rollout.engine_request import EngineRequest, append_reply, check_reply, send, send_options
from slime.utils.errors import EngineError
from slime.utils.http_utils import receive_stream


async def generate_streaming(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate the response of one sample, or the rest of it, event by event.

    If the rollout is aborted meanwhile, the sample keeps the tokens of the last event, with status ABORTED.

    Raises:
        DataError: a prompt that cannot be sent.
        EngineError: the request was refused, no engine answered, or the reply is not that of an SGLang server.
        ConnectionError: the reply broke off, and the sample is unchanged.
        RequestExpired: ``--rollout-request-timeout`` passed.
    """
    state = sglang_rollout.GenerateState(args)
    request = await sglang_rollout.prepare_request(args, sample, sampling_params)
    if request is None:
        return sample
    request = replace(request, payload=request.payload | {"stream": True})
    response = _Response()

    def receive(event: Any) -> bool:
        response.add(_checked(request, event, sample), sample)
        # False closes the connection, which makes the engine drop the request.
        return not state.is_ending

    attrs = {"max_new_tokens": sampling_params["max_new_tokens"]}
    with trace_span(sample, "sglang_generate_stream", attrs=attrs) as span, state.waiting_for(request):
        await send(request, receive_stream, receive=receive, **send_options(args, request, sample))
    meta = response.meta_info
    if response.has_begun:
        span.update(build_sglang_meta_trace_attrs(meta))
    is_finished = bool(meta.get("finish_reason"))
    if not is_finished and not state.is_ending:
        raise ConnectionError(f"the stream of sample {sample.index} ended before the engine finished")
    if response.has_begun:
        reply = {"text": response.text, "meta_info": meta}
        append_reply(args, sample, sampling_params, state.tokenizer, reply, is_finished=is_finished)
    if not is_finished:
        sample.status = Sample.Status.ABORTED
    return sample


generate_streaming.continues_aborted = True  # type: ignore[attr-defined]


class _Response:
    """The received part of a response: the last event, or all events if each holds the new tokens only."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._num_tokens = 0

    @property
    def has_begun(self) -> bool:
        return bool(self._events)

    @property
    def text(self) -> str:
        return "".join(event["text"] for event in self._events)

    @property
    def meta_info(self) -> dict[str, Any]:
        """The ``meta_info`` of the last event, with the lists of all tokens. Empty before the first event."""
        metas = [event["meta_info"] for event in self._events]
        joined = {
            key: list(chain.from_iterable(meta.get(key) or () for meta in metas))
            for key in OUTPUT_LISTS
            if any(key in meta for meta in metas)
        }
        return (metas[-1] if metas else {}) | joined

    def add(self, event: dict[str, Any], sample: Sample) -> None:
        meta = event["meta_info"]
        num_new = len(meta.get("output_token_logprobs") or ())
        count = meta.get("completion_tokens", num_new)
        # The event holds all tokens so far. An event without tokens must not erase the earlier ones.
        if num_new == count and (count > 0 or not self._events):
            self._events = [event]
        elif count in (0, self._num_tokens + num_new):  # 0: an abort whose tokens came without their sets
            self._events.append(event)
        else:
            raise EngineError(
                f"an event for sample {sample.index} holds {num_new} tokens after {self._num_tokens}, of {count} in "
                "all: events of its stream are missing"
            )
        self._num_tokens = count or self._num_tokens


def _checked(request: EngineRequest, event: Any, sample: Sample) -> dict[str, Any]:
    if isinstance(event, dict) and "error" in event:
        raise EngineError(f"the engine refused sample {sample.index} in its stream: {str(event['error'])[:300]}")
    return check_reply(request, sample, event)
