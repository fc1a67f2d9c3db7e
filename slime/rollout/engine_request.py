"""Generation requests: flags and a sample in, an :class:`EngineRequest` out; reply and response without its stop token.

Used for whole and for streamed requests, and by agents' adapters. Only :func:`send` and :func:`abort` wait.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from slime.config.groups import from_args
from slime.data.engine_fields import (
    LACKS_SETS,
    OUTPUT_LISTS,
    PAST_THE_ROUTER,
    REPLAY_TOP_K,
    FieldFlags,
    lacks_sets,
    sampled_tokens,
)
from slime.data.processing import (
    encode_image_for_rollout_engine,
    has_media,
    load_processor,
    run_processor,
    with_single_placeholders,
)
from slime.data.sample import Sample, iter_samples
from slime.data.schedule import note_part
from slime.observability.trace_utils import trace_headers
from slime.rollout.eval_config import EvalDatasetConfig
from slime.utils.errors import DataError, DeadlineExceeded, EngineError
from slime.utils.http_utils import Url, get, post

logger = logging.getLogger(__name__)

_RETRIES = 8  # with the pauses of http_utils about 20 s, then the engines count as dead
_LONGEST_PAUSE_S = 5.0  # of http_utils, seconds between two attempts
ABORT_TIMEOUT_S = 5.0
# Concurrent abort requests: each id goes to every engine, because the router does not show which engine has it.
_MOST_ABORTS = 64
_IS_COPY = "Duplicate request ID"  # SGLang's refusal of an id that it already runs


@dataclass(frozen=True, eq=False)
class EngineRequest:
    """A request that can be sent several times.

    Attributes:
        rids: the ids of its attempts.
        workers_url: route of the router that lists the engines.
        session_id: of the sample, if the request is sent again after an abort (:mod:`slime.rollout.direct_engines`).
    """

    url: Url
    payload: dict[str, Any]
    headers: dict[str, str] | None
    rids: list[str] = field(default_factory=list)
    workers_url: str = ""
    session_id: str = ""

    @property
    def goes_past_the_router(self) -> bool:
        """Whether the payload has a field that the router would drop."""
        return not PAST_THE_ROUTER.isdisjoint(self.payload)

    def new_attempt(self) -> dict[str, Any]:
        """The payload with a new id."""
        self.rids.append(uuid4().hex)  # a lost attempt may still be running under its id
        return self.payload | {"rid": self.rids[-1]}


async def send(request: EngineRequest, call: Callable[..., Awaitable[Any]], **options: Any) -> Any:
    """``await call(url, payload, **options)``, with ``post`` or ``receive_stream`` of ``http_utils``.

    The router repeats a request whose connection broke under the same id, and the engine refuses the copy while the
    first one still runs. The reply to that one is lost: it is aborted, and another attempt gets a new id.
    """
    for _ in range(_RETRIES):
        try:
            return await call(request.url, request.new_attempt, **options)
        except EngineError as error:
            if _IS_COPY not in str(error):
                raise
        try:
            await abort(request.workers_url, [{"rid": request.rids[-1]}])
        except (EngineError, DeadlineExceeded) as error:  # it runs to its end, without a reader
            logger.warning("request %s could not be aborted: %s", request.rids[-1], error)
    return await call(request.url, request.new_attempt, **options)


async def abort(workers_url: str, bodies: Sequence[dict[str, Any]]) -> None:
    """Send each body to ``/abort_request`` of every engine. The router has no route for aborts.

    Raises:
        EngineError, DeadlineExceeded: the list or an engine did not answer.
    """
    slots = asyncio.Semaphore(_MOST_ABORTS)

    async def tell(url: str, body: dict[str, Any]) -> None:
        async with slots:
            await abort_at(url, body)

    try:
        urls = [worker["url"] for worker in (await get(workers_url, timeout_s=ABORT_TIMEOUT_S))["workers"]]
    except (KeyError, TypeError) as error:
        raise EngineError(f"GET {workers_url} did not list engines: {error!r}") from error
    await asyncio.gather(*(tell(url, body) for url in urls for body in bodies))


async def abort_at(engine_url: str, body: dict[str, Any]) -> None:
    """Send ``body`` to ``/abort_request`` of one engine. One attempt: callers do without those that do not arrive."""
    await post(f"{engine_url}/abort_request", body, max_retries=0, timeout_s=ABORT_TIMEOUT_S)


def send_options(args: Any, request: EngineRequest, sample: Sample) -> dict[str, Any]:
    """Options of :func:`send` in a rollout: attempts, headers and deadline. Called inside the span of the request."""
    retries = _RETRIES
    if args.use_fault_tolerance:
        # Twice: with fault tolerance a new engine may die once more before it answers.
        retries += math.ceil(2 * args.engine_start_timeout / _LONGEST_PAUSE_S)
    headers = {**(request.headers or {}), **trace_headers(args, sample)}
    return {"max_retries": retries, "headers": headers or None, "timeout_s": args.rollout_request_timeout}


def train_sampling_params(args: Any) -> dict[str, Any]:
    """``sampling_params`` of training requests."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": REPLAY_TOP_K if args.rollout_top_p != 1.0 and args.rollout_top_k == -1 else args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,  # the text must be that of the tokens
        # With spaces, the text would differ from that of the tokens.
        "spaces_between_special_tokens": False,
    }


def eval_sampling_params(config: EvalDatasetConfig, of_training: Mapping[str, Any]) -> dict[str, Any]:
    """``sampling_params`` of one evaluation set. What ends a response, and its text, is as in training by default."""
    optional = {"repetition_penalty": config.repetition_penalty, "min_new_tokens": config.min_new_tokens}
    return {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": of_training["stop"] if config.stop is None else config.stop,
        "stop_token_ids": of_training["stop_token_ids"] if config.stop_token_ids is None else config.stop_token_ids,
        "skip_special_tokens": of_training["skip_special_tokens"]
        if config.skip_special_tokens is None
        else config.skip_special_tokens,
        "no_stop_trim": True if config.no_stop_trim is None else config.no_stop_trim,
        "spaces_between_special_tokens": False,
    } | {name: value for name, value in optional.items() if value is not None}


def prepare_prompt_ids(sample: Sample, tokenizer: Any, processor: Any = None) -> list[int]:
    """The token ids to continue from: those of the sample, else its tokenized prompt.

    For a sample with media this also fills in ``multimodal_train_inputs``, which is slow: call it in a thread.

    Raises:
        DataError: a prompt that is not text or has no token; media without a processor.
    """
    with_media = has_media(sample.multimodal_inputs)
    # A continued sample has its tokens. With media it also needs the trainer's inputs, which the processor makes.
    if sample.tokens and (sample.multimodal_train_inputs is not None or not with_media):
        return list(sample.tokens)
    if not isinstance(sample.prompt, str):
        kind = "a list of messages" if isinstance(sample.prompt, list) else f"{sample.prompt!r}, which is no text"
        raise DataError(
            f"the prompt of sample {sample.index} is {kind}: use --apply-chat-template, or a "
            "--custom-generate-function-path that handles such prompts"
        )
    ids = _ids_with_media(sample, processor) if with_media else list(_encode(tokenizer, sample.prompt))
    if not ids:
        raise DataError(f"the prompt of sample {sample.index} has no token: {sample.prompt!r}")
    return ids


def _ids_with_media(sample: Sample, processor: Any) -> list[int]:
    if processor is None:
        raise DataError(f"sample {sample.index} has images, but the checkpoint of --hf-checkpoint has no processor")
    ids, train_inputs = run_processor(processor, str(sample.prompt), sample.multimodal_inputs or {})
    if sample.multimodal_train_inputs is None:
        sample.multimodal_train_inputs = train_inputs
    return list(sample.tokens) or ids


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a text, cached because the samples of a group share their prompt."""
    # The tokenizer of a user's test may be unhashable, which lru_cache refuses.
    has_hash = type(tokenizer).__hash__ is not None
    return _encode_once(tokenizer, text) if has_hash else _encode_once.__wrapped__(tokenizer, text)


@functools.lru_cache(maxsize=1024)
def _encode_once(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def build_request(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], ids: Sequence[int], *, is_trained: bool = True
) -> EngineRequest | None:
    """The request for the response of a sample, or for its rest. None without room for a token: it is then truncated.

    Args:
        ids: prompt and response so far. They become the sample's tokens if it has none.
        is_trained: False for an evaluation, whose requests do not ask for sampling sets.

    Raises:
        ValueError: the sample is finished.
        DataError: ids that the model does not know.
    """
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise ValueError(f"sample {sample.index} has status {sample.status.value}: there is nothing to generate")
    _check_token_ids(sample, ids, args.hf_checkpoint)
    room = response_room(args.rollout_max_context_len, sample, len(ids), sampling_params["max_new_tokens"])
    # Also without room: a truncated sample keeps the tokens of its prompt.
    if not sample.tokens:
        sample.tokens = list(ids)
    if room <= 0:
        sample.status = Sample.Status.TRUNCATED
        return None
    payload = {
        **prompt_fields(args.hf_checkpoint, sample, ids),
        "sampling_params": {**sampling_params, "max_new_tokens": room},
        "return_logprob": True,
        **from_args(FieldFlags, args).adapter_fields,
    }
    if args.use_rollout_routing_replay:
        payload["return_routed_experts"] = True
    if is_trained and from_args(FieldFlags, args).cuts_vocabulary:
        payload["return_sampling_mask"] = True
    headers = None
    # All requests of a session go to the engine whose cache holds its earlier tokens.
    if sample.session_id and args.router_policy == "consistent_hashing":
        headers = {"X-SMG-Routing-Key": sample.session_id}
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    request = EngineRequest(f"{router}/generate", payload, headers, workers_url=f"{router}/workers")
    # A user's generate function may end with a request that was aborted.
    has_function = args.custom_generate_function_path or sample.generate_function_path
    return request if has_function else replace(request, session_id=sample.session_id or "")


def response_room(max_context_len: int | None, sample: Sample, num_tokens: int, max_new_tokens: int) -> int:
    """The number of new tokens that the length limits of response and context leave. May be 0 or less."""
    room = max_new_tokens - sample.response_length
    return room if max_context_len is None else min(room, max_context_len - num_tokens)


def _check_token_ids(sample: Sample, ids: Sequence[int], hf_checkpoint: str) -> None:
    size = _vocab_size(hf_checkpoint)
    # An id without an embedding kills the engine, so it is not sent.
    if size is not None and ids and (max(ids) >= size or min(ids) < 0):
        bad = next(i for i in ids if not 0 <= i < size)
        raise DataError(
            f"sample {sample.index} holds token id {bad}, but the model of --hf-checkpoint {hf_checkpoint} knows ids "
            f"below {size}: the tokenizer does not belong to the model"
        )


@functools.lru_cache(maxsize=8)
def _vocab_size(hf_checkpoint: str) -> int | None:
    file = Path(hf_checkpoint) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return None if size is None else int(size)


def prompt_fields(hf_checkpoint: str, sample: Sample, ids: Sequence[int]) -> dict[str, Any]:
    """Token ids, or with images the text until there is a response. The engine fills in the placeholders of images."""
    images = (sample.multimodal_inputs or {}).get("images")
    if not images:
        return {"input_ids": ids}
    image_data = [encode_image_for_rollout_engine(image) for image in images]
    if sample.response_length == 0:
        return {"image_data": image_data, "text": sample.prompt}
    processor = load_processor(hf_checkpoint, trust_remote_code=True)
    return {"image_data": image_data, "input_ids": with_single_placeholders(processor, ids)}


def check_reply(request: EngineRequest, sample: Sample, reply: Any) -> dict[str, Any]:
    """Return the reply if it is that of an SGLang server and answers the request.

    Raises:
        EngineError: it is not.
    """
    if not isinstance(reply, dict) or "meta_info" not in reply:
        raise EngineError(f"the reply for sample {sample.index} is not that of an SGLang server: {str(reply)[:300]}")
    meta = reply["meta_info"]
    if lacks_sets(request.payload, meta):
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            # The engine had put the request back into its queue and aborted it there: it returns the tokens without
            # their sets. Such tokens cannot be trained.
            return _without_tokens(reply)
        raise EngineError(f"sample {sample.index}: {LACKS_SETS}")
    return reply


def _without_tokens(reply: Mapping[str, Any]) -> dict[str, Any]:
    of_tokens = (*OUTPUT_LISTS, "routed_experts")
    meta = {key: value for key, value in reply["meta_info"].items() if key not in of_tokens}
    return {**reply, "text": "", "meta_info": meta | {"output_token_logprobs": [], "completion_tokens": 0}}


def append_reply(
    args: Namespace,
    sample: Sample,
    sampling_params: Mapping[str, Any],
    tokenizer: Any,
    reply: Mapping[str, Any],
    *,
    is_finished: bool = True,
) -> None:
    """Append the response in a checked reply, and remove the text of its stop token.

    Args:
        is_finished: False for the first part of a response, whose stream was closed.
    """
    if (reply["meta_info"].get("finish_reason") or {}).get("type") == "abort":
        reply = _of_abort(reply, sampling_params, stop_token_ids(args.hf_checkpoint, sampling_params, tokenizer))
    meta = reply["meta_info"]
    tokens, log_probs = sampled_tokens(meta)
    if not tokens and (meta.get("finish_reason") or {}).get("type") == "abort":
        # It waited in a queue. When it leaves one depends on the load, and records of deterministic runs must not.
        sample.status = Sample.Status.ABORTED
        return
    sample.append_response_tokens(
        args, tokens=tokens, log_probs=log_probs, text=reply["text"], meta_info=meta, update_terminal_info=is_finished
    )
    if not is_finished and tokens and "weight_version" in meta:
        sample.weight_versions.append(meta["weight_version"])
    if args.deterministic_mode:
        note_part(sample, meta.get("weight_version"))
    if not args.keep_stop_token_text:
        cut_stop_token(args.hf_checkpoint, sample, sampling_params, tokenizer, meta.get("finish_reason"))


def _of_abort(reply: Mapping[str, Any], sampling_params: Mapping[str, Any], stop_ids: set[int]) -> Mapping[str, Any]:
    """The reply as one that stopped, if its response is complete: it must not be continued after its stop token.

    SGLang does not look for stop tokens and strings in the step that aborts a request. With speculative decoding such a
    step may sample tokens after the stop token: then its tokens do not count.
    """
    tokens, _ = sampled_tokens(reply["meta_info"])
    is_stop = [not sampling_params.get("ignore_eos") and int(token) in stop_ids for token in tokens]
    if any(is_stop[:-1]):
        return _without_tokens(reply)
    strings = sampling_params.get("stop") or ()
    has_string = any(string in reply["text"] for string in ([strings] if isinstance(strings, str) else strings))
    changed = {"finish_reason": {"type": "stop"}} if has_string or any(is_stop) else {}
    return {**reply, "meta_info": reply["meta_info"] | changed}


def stop_token_ids(hf_checkpoint: str | None, sampling_params: Mapping[str, Any], tokenizer: Any) -> set[int]:
    """The ids that end a generation: those of the checkpoint, of its tokenizer, and of the request."""
    ids = set(_stop_ids_of_checkpoint(hf_checkpoint or ""))
    for value in (getattr(tokenizer, "eos_token_id", None), sampling_params.get("stop_token_ids")):
        ids.update(_as_ids(value))
    return ids


def cut_stop_token(
    checkpoint: str | None, result: Any, sampling_params: Mapping[str, Any], tokenizer: Any, finish_reason: Any = None
) -> None:
    """Remove the text of a last stop token from completed responses, in place.

    A chat model ends its answer with a token such as ``<|im_end|>``. The token stays in tokens, log-probs and mask, but
    reward functions compare ``sample.response`` with a label, which has no such token. Its text stays in
    ``sample.stop_text``, and ``append_response_tokens`` puts it back before it appends. The text of a stop string
    (``--rollout-stop``) stays. Not called with ``--keep-stop-token-text``.

    Args:
        result: samples, nested as a generate function returns them.
        finish_reason: the engine's, if known. It may name a stop token that no file of the checkpoint names.
    """
    if tokenizer is None:
        return
    ids = stop_token_ids(checkpoint, sampling_params, tokenizer)
    if isinstance(finish_reason, dict):
        ids.update(_as_ids(finish_reason.get("matched")))
    for sample in iter_samples(result):
        # A last token outside the mask was written by a template or a tool, not sampled.
        is_own = sample.loss_mask is None or bool(sample.loss_mask and sample.loss_mask[-1])
        is_over = sample.status is Sample.Status.COMPLETED and sample.response_length > 0 and len(sample.tokens) > 0
        if is_over and is_own and int(sample.tokens[-1]) in ids:
            _cut(sample, tokenizer.decode([int(sample.tokens[-1])]))


def _cut(sample: Sample, stop: str) -> None:
    # The response itself may end with the same text, so a second call must not cut again.
    is_cut = sample.stop_text == [len(sample.response), stop]
    if stop and not is_cut and sample.response.endswith(stop):
        sample.response = sample.response.removesuffix(stop)
        sample.stop_text = [len(sample.response), stop]


@functools.lru_cache(maxsize=8)
def _stop_ids_of_checkpoint(directory: str) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = Path(directory) / name
        if directory and file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            for section in (config, config.get("text_config") or {}):
                ids.update(_as_ids(section.get("eos_token_id")))
    return frozenset(ids)


def _as_ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list | tuple | set) else [value]
    # bool is a subclass of int.
    return (item for item in values if isinstance(item, int) and not isinstance(item, bool))
