"""Tokenizer, chat template, and the first row of every prompt file."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.data.chat import load_tokenizer, render_chat
from slime.data.prompts import prompt_key_of, read_file
from slime.doctor.finding import Finding, Situation, fail, ok, warn
from slime.utils.errors import DataError

__all__ = ["chat_template", "first_row", "tokenizer"]

_TEXT = "2 + 2 = 4, isn't it?\n\tüber 你好"
_WORD = "2 + 2"
_MESSAGES = [{"role": "user", "content": "How much is 2 + 2?"}]


def tokenizer(situation: Situation) -> Iterator[Finding]:
    """Text survives encoding and decoding, and every id has a row in the embedding."""
    args = situation.args
    if args is None or not _has_checkpoint(args):
        return
    try:
        words = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)  # as the run does
    except DataError as error:
        yield fail("tokenizer", str(error), "the directory needs tokenizer.json or the files of the tokenizer's class")
        return
    back = words.decode(words.encode(_TEXT, add_special_tokens=False))
    vocab = vars(args).get("vocab_size")
    if vocab is not None and len(words) > vocab:
        value = f"{len(words)} tokens, but the model has {vocab} rows"
        yield fail("tokenizer", value, "the tokenizer belongs to another checkpoint")
    elif _WORD not in back:  # transformers makes up an empty tokenizer where the files are missing
        value = f"{type(words).__name__} of {len(words)} tokens does not know the text {_WORD!r}"
        yield fail(
            "tokenizer", value, "copy tokenizer.json, or the files of the tokenizer's class, into the checkpoint"
        )
    elif back != _TEXT:
        yield warn(
            "tokenizer", f"{_TEXT!r} comes back as {back!r}", "harmless if no prompt and no answer has such characters"
        )
    else:
        yield ok("tokenizer", f"{type(words).__name__}, {len(words)} tokens, round trip exact")


def chat_template(situation: Situation) -> Iterator[Finding]:
    """The template renders, where prompts go through it."""
    args = situation.args
    if args is None or not args.apply_chat_template or not _has_checkpoint(args):
        return
    try:
        words = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        text = render_chat(words, _MESSAGES, add_generation_prompt=True, **(args.apply_chat_template_kwargs or {}))
    except DataError as error:
        yield fail("chat template", str(error), "drop --apply-chat-template, or use an instruct checkpoint")
        return
    if _MESSAGES[0]["content"] in text:
        yield ok("chat template", f"renders, {len(text)} characters around one message")
    else:
        yield fail(
            "chat template", f"the message is not in its output {text[:60]!r}", "the template drops user messages"
        )


def first_row(situation: Situation) -> Iterator[Finding]:
    """The first row has the keys that the flags name. Later rows are the data source's business."""
    args = situation.args
    if args is None:
        return
    if args.prompt_data is not None and args.load_debug_rollout_data is None:
        yield from _row("--prompt-data", args.prompt_data, args)
    for dataset in vars(args).get("eval_datasets") or ():
        yield from _row(f"evaluation {dataset.name}", dataset.path, args)


def _row(what: str, path: str, args: Namespace) -> Iterator[Finding]:
    try:
        row: dict[str, Any] | None = next(itertools.islice(read_file(path), 1), None)
    except (DataError, OSError, ImportError) as error:
        yield fail(what, str(error), "")
        return
    if row is None:
        yield fail(what, f"{path}: there is no row in it", "")
        return
    has = f"the first row of {Path(path).name} has {', '.join(map(str, row))}"
    if prompt_key_of(row, args.input_key) is None:
        yield fail(what, f"{has}, not {args.input_key}", "name its prompt with --input-key")
    elif args.label_key is not None and args.label_key not in row:
        yield fail(what, f"{has}, not {args.label_key}", "name its label with --label-key")
    else:
        yield ok(what, has)


def _has_checkpoint(args: Namespace) -> bool:
    return args.hf_checkpoint is not None and Path(args.hf_checkpoint).is_dir()
