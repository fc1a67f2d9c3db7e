"""The generation request of one sample. Built here once, whoever sends it: whole or as a stream."""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from slime.data.media import (
    encode_image_for_rollout_engine,
    has_media,
    load_processor,
    run_processor,
    with_single_placeholders,
)
from slime.data.sample import Sample, iter_samples
from slime.data.sampling_mask import LACKS_SETS, REPLAY_TOP_K, cuts_vocabulary, lacks_sets
from slime.rollout.direct_engines import PAST_THE_ROUTER
from slime.rollout.eval_config import EvalDatasetConfig
from slime.rollout.settings import setting
from slime.utils.errors import DataError, EngineError
from slime.utils.http_utils import Url

__all__ = [
    "EngineRequest",
    "build_request",
    "check_reply",
    "check_token_ids",
    "cut_stop_token",
    "eval_sampling_params",
    "prepare_prompt_ids",
    "response_room",
    "stop_token_ids",
    "train_sampling_params",
]


@dataclass(frozen=True, eq=False)
class EngineRequest:
    """Ready to be sent, once or again. ``rids`` are the ids under which it was."""

    url: Url
    payload: dict[str, Any]
    headers: dict[str, str] | None
    rids: list[str] = field(default_factory=list)

    @property
    def goes_past_the_router(self) -> bool:
        """Whether it asks for something that the router drops from requests."""
        return not PAST_THE_ROUTER.isdisjoint(self.payload)

    def new_attempt(self) -> dict[str, Any]:
        """The payload with an id of its own: an attempt that got lost may still be running under its id."""
        self.rids.append(uuid4().hex)
        return self.payload | {"rid": self.rids[-1]}


def build_request(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], ids: Sequence[int], *, is_trained: bool = True
) -> EngineRequest | None:
    """What generates the response of a sample, or the rest of it; None where no room is left: it is truncated then.

    Args:
        ids: prompt, and response so far; become the sample's tokens if it has none.
        is_trained: not of an evaluation, for which what only the trainer needs is left out.

    Raises:
        ValueError: the sample is finished.
        DataError: ids that the model does not know.
    """
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise ValueError(f"sample {sample.index} has status {sample.status.value}: there is nothing to generate")
    check_token_ids(sample, ids, args.hf_checkpoint)
    room = response_room(args, sample, len(ids), sampling_params["max_new_tokens"])
    if not sample.tokens:
        sample.tokens = list(ids)
    if room <= 0:
        sample.status = Sample.Status.TRUNCATED
        return None
    payload = {
        **_prompt(args, sample, ids),
        "sampling_params": {**sampling_params, "max_new_tokens": room},
        "return_logprob": True,
    }
    if getattr(args, "use_rollout_routing_replay", False):  # not a flag of this room
        payload["return_routed_experts"] = True
    if is_trained and cuts_vocabulary(args):
        payload["return_sampling_mask"] = True
    headers = None
    if sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing":
        headers = {"X-SMG-Routing-Key": sample.session_id}
    return EngineRequest(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload, headers)


def check_reply(request: EngineRequest, sample: Sample, reply: Any) -> dict[str, Any]:
    """The reply, if it is one of an SGLang server that told what it was asked for.

    A request that is aborted while it waits in the engine's queue, having been put back there, comes with its tokens
    but without their sets: those tokens cannot be trained and are dropped, as if none had been generated yet.

    Raises:
        EngineError: it is not.
    """
    if not isinstance(reply, dict) or "meta_info" not in reply:
        raise EngineError(f"the reply for sample {sample.index} is not that of an SGLang server: {str(reply)[:300]}")
    meta = reply["meta_info"]
    if lacks_sets(request.payload, meta):
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            return reply | {"text": "", "meta_info": meta | {"output_token_logprobs": [], "completion_tokens": 0}}
        raise EngineError(f"sample {sample.index}: {LACKS_SETS}")
    return reply


def _prompt(args: Namespace, sample: Sample, ids: Sequence[int]) -> dict[str, Any]:
    """Token ids; with images the text until there is a response. The engine fills in the placeholders of images."""
    images = (sample.multimodal_inputs or {}).get("images")
    if not images:
        return {"input_ids": ids}
    image_data = [encode_image_for_rollout_engine(image) for image in images]
    if sample.response_length == 0:
        return {"image_data": image_data, "text": sample.prompt}
    processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
    return {"image_data": image_data, "input_ids": with_single_placeholders(processor, ids)}


# From flags and a sample to the request that the engine gets. Nothing here waits or sends.


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
        "spaces_between_special_tokens": False,
    }


def eval_sampling_params(config: EvalDatasetConfig) -> dict[str, Any]:
    """``sampling_params`` of one evaluation set."""
    params: dict[str, Any] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
        "skip_special_tokens": bool(config.skip_special_tokens),
        "no_stop_trim": True if config.no_stop_trim is None else config.no_stop_trim,
        "spaces_between_special_tokens": False,
    }
    for name in ("repetition_penalty", "min_new_tokens"):
        if getattr(config, name) is not None:
            params[name] = getattr(config, name)
    return params


def prepare_prompt_ids(sample: Sample, tokenizer: Any, processor: Any = None) -> list[int]:
    """Token ids to continue from: those the sample has, else its tokenized prompt.

    Of a sample with media also ``multimodal_train_inputs`` is filled in, which takes long: call it in a thread.

    Raises:
        DataError: a prompt that is not text, or that has no token; media without a processor.
    """
    with_media = has_media(sample.multimodal_inputs)
    if sample.tokens and (sample.multimodal_train_inputs is not None or not with_media):
        return list(sample.tokens)
    if not isinstance(sample.prompt, str):
        kind = "a list of messages" if isinstance(sample.prompt, list) else f"{sample.prompt!r}, which is no text"
        raise DataError(
            f"the prompt of sample {sample.index} is {kind}: use --apply-chat-template, or a "
            "--custom-generate-function-path that handles such prompts"
        )
    ids = _with_media(sample, processor) if with_media else list(_encode(tokenizer, sample.prompt))
    if not ids:
        raise DataError(f"the prompt of sample {sample.index} has no token: {sample.prompt!r}")
    return ids


def _with_media(sample: Sample, processor: Any) -> list[int]:
    if processor is None:
        raise DataError(f"sample {sample.index} has images, but the checkpoint of --hf-checkpoint has no processor")
    ids, train_inputs = run_processor(processor, str(sample.prompt), sample.multimodal_inputs or {})
    if sample.multimodal_train_inputs is None:
        sample.multimodal_train_inputs = train_inputs
    return list(sample.tokens) or ids


def response_room(args: Any, sample: Sample, num_tokens: int, max_new_tokens: int) -> int:
    """New tokens that ``--rollout-max-response-len`` and ``--rollout-max-context-len`` leave; may be 0 or less."""
    room = max_new_tokens - sample.response_length
    context = setting(args, "rollout_max_context_len")
    return room if context is None else min(room, context - num_tokens)


def check_token_ids(sample: Sample, ids: Sequence[int], hf_checkpoint: str) -> None:
    """An id that the model has no embedding for would kill the engine, so it is not sent."""
    size = _vocab_size(hf_checkpoint)
    if size is not None and ids and (max(ids) >= size or min(ids) < 0):
        bad = next(i for i in ids if not 0 <= i < size)
        raise DataError(
            f"sample {sample.index} holds token id {bad}, but the model of --hf-checkpoint {hf_checkpoint} knows ids "
            f"below {size}: the tokenizer does not belong to the model"
        )


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Cached, because the samples of a group have the same prompt; a test's tokenizer may have no hash."""
    has_hash = type(tokenizer).__hash__ is not None
    return _encode_once(tokenizer, text) if has_hash else _encode_once.__wrapped__(tokenizer, text)


@functools.lru_cache(maxsize=1024)
def _encode_once(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@functools.lru_cache(maxsize=8)
def _vocab_size(hf_checkpoint: str) -> int | None:
    file = Path(hf_checkpoint) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return None if size is None else int(size)


# The stop token that ended a response: part of its tokens, log-probs and mask, not of its text.
#
# A chat model ends its answer with a token such as ``<|im_end|>``. Reward functions compare ``sample.response`` with a
# label, and the label has no such token. Called by the rollout at the end of a generation.

_FILES = ("config.json", "generation_config.json")


def stop_token_ids(args: Any, sampling_params: Mapping[str, Any], tokenizer: Any) -> set[int]:
    """Ids that end a generation: those of the checkpoint, of its tokenizer, and of the request."""
    ids = set(_of_checkpoint(str(getattr(args, "hf_checkpoint", ""))))
    for value in (getattr(tokenizer, "eos_token_id", None), sampling_params.get("stop_token_ids")):
        ids.update(_as_ids(value))
    return ids


def cut_stop_token(
    args: Any, result: Any, sampling_params: Mapping[str, Any], tokenizer: Any, finish_reason: Any = None
) -> None:
    """Remove the text of the last token from completed responses, in place, if it is a stop token.

    The text stays in ``sample.stop_text``; ``append_response_tokens`` puts it back before it appends. The text of a
    stop string (``--rollout-stop``) stays, and so does everything with ``--keep-stop-token-text``.

    Args:
        result: samples, nested as a generate function returns them.
        finish_reason: the engine's, if known. It names stop tokens that no file of the checkpoint names.
    """
    if setting(args, "keep_stop_token_text") or tokenizer is None:
        return
    ids = stop_token_ids(args, sampling_params, tokenizer)
    if isinstance(finish_reason, dict):
        ids.update(_as_ids(finish_reason.get("matched")))
    for sample in iter_samples(result):
        is_own = sample.loss_mask is None or bool(sample.loss_mask and sample.loss_mask[-1])
        is_over = sample.status is Sample.Status.COMPLETED and sample.response_length > 0 and len(sample.tokens) > 0
        if is_over and is_own and int(sample.tokens[-1]) in ids:
            _cut(sample, tokenizer.decode([int(sample.tokens[-1])]))


def _cut(sample: Sample, stop: str) -> None:
    is_cut = getattr(sample, "stop_text", None) == [len(sample.response), stop]
    if stop and not is_cut and sample.response.endswith(stop):
        sample.response = sample.response.removesuffix(stop)
        sample.stop_text = [len(sample.response), stop]  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=8)
def _of_checkpoint(directory: str) -> frozenset[int]:
    ids: set[int] = set()
    for name in _FILES:
        file = Path(directory) / name
        if directory and file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            for section in (config, config.get("text_config") or {}):
                ids.update(_as_ids(section.get("eos_token_id")))
    return frozenset(ids)


def _as_ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list | tuple | set) else [value]
    return (item for item in values if isinstance(item, int) and not isinstance(item, bool))
