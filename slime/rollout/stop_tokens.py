"""The stop token that ended a response: part of its tokens, log-probs and mask, not of its text.

A chat model ends its answer with a token such as ``<|im_end|>``. Reward functions compare ``sample.response`` with a
label, and the label has no such token. Called by the rollout at the end of a generation.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.data.sample import Sample, iter_samples
from slime.rollout.settings import setting

__all__ = ["cut_stop_token", "stop_token_ids"]

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
