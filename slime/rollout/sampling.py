"""From flags and a sample to the request that the engine gets. Nothing here waits or sends."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.data.media import has_media, run_processor
from slime.data.sample import Sample
from slime.data.sampling_mask import REPLAY_TOP_K
from slime.rollout.eval_config import EvalDatasetConfig
from slime.rollout.settings import setting
from slime.utils.errors import DataError

__all__ = ["check_token_ids", "eval_sampling_params", "prepare_prompt_ids", "response_room", "train_sampling_params"]


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
