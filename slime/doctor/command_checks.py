"""Checks of a train command: arguments, functions, checkpoint, tokenizer, data, disk space."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from slime.config.plan import Output, plan_files
from slime.config.plan.placement import PlanError
from slime.config.plan.render import size
from slime.config.plan.shape import read_shape
from slime.data.processing import load_tokenizer, render_chat
from slime.data.prompts import prompt_key_of
from slime.data.rows import read_file
from slime.doctor import Check, Finding, Situation, fail, machine_checks, ok, warn
from slime.hooks import check_hooks
from slime.hooks.protocols import HOOKS
from slime.models.shape import ModelShape
from slime.utils.errors import DataError
from slime.utils.prompt_sources import parse_sources


def arguments(situation: Situation) -> Iterator[Finding]:
    """Every problem that prevents ``train.py`` from starting."""
    for problem in situation.problems:
        yield fail("arguments", problem, "")
    if situation.args is not None and not situation.problems:
        yield ok("arguments", f"{len(situation.args.given)} flags given, no contradiction")


def notices(situation: Situation) -> Iterator[Finding]:
    """Warnings about guessed and ignored flags."""
    for notice in situation.args.notices if situation.args is not None else ():
        if notice.level == "warning":
            yield warn("arguments", f"{notice.flag}: {notice.text}", "")


def hooks(situation: Situation) -> Iterator[Finding]:
    """Every function that a flag names can be imported, and accepts the arguments of its hook."""
    if situation.args is None:
        return
    problems = check_hooks(situation.args)
    for problem in problems:
        yield fail("function", problem, "")
    named = [hook.flag for hook in HOOKS if hook.dest in situation.args.given]
    if not problems:
        yield ok("functions", f"{', '.join(named)}: imported, signatures fit" if named else "slime's own")


_INDEX = "model.safetensors.index.json"
_DOWNLOAD = "download it again: hf download <model> --local-dir {0}"


def weights(situation: Situation) -> Iterator[Finding]:
    """Every file of the index exists and is complete."""
    path = situation.args.hf_checkpoint if situation.args is not None else None
    if path is None or not _is_folder(path):
        return  # reported by the checks of the arguments
    root, fix = Path(path), _DOWNLOAD.format(path)
    try:
        files = _files(root)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield fail("weights", f"{root / _INDEX} cannot be read: {error}", fix)
        return
    if not files:
        yield fail("weights", f"{path} holds no .safetensors file", fix)
        return
    missing = [name for name in files if not (root / name).is_file()]
    if missing:
        yield fail("weights", f"{len(missing)} of {len(files)} files are missing: {_listed(missing)}", fix)
    torn = [name for name in files if name not in missing and not _is_whole(root / name)]
    if torn:
        yield fail("weights", f"truncated or damaged: {_listed(torn)}", fix)
    if not missing and not torn:
        total = sum(os.path.getsize(root / name) for name in files)
        yield ok("weights", f"complete: {len(files)} x .safetensors, {size(total)} ({path})")


def resume(situation: Situation) -> Iterator[Finding]:
    """Which checkpoint training would start from."""
    from slime.backends.training.arguments import CheckpointArgs
    from slime.backends.training.checkpoint_source import find_start
    from slime.config.groups import from_args
    from slime.utils.errors import ConfigError

    args = situation.args
    if args is None or args.debug_rollout_only or args.hf_checkpoint is None:
        return
    try:
        source = find_start(from_args(CheckpointArgs, args), args.hf_checkpoint)
    except ConfigError as error:
        yield fail("start", str(error), "")
        return
    where = f"iteration {source.iteration} of {source.directory}" if source.format == "torch_dist" else source.directory
    yield ok("start", f"training starts from {where} ({source.flag})")


def _files(root: Path) -> list[str]:
    """Weight files of the index. Without an index, all safetensors files."""
    if not (root / _INDEX).is_file():
        return sorted(file.name for file in root.glob("*.safetensors"))
    index = json.loads((root / _INDEX).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def _is_whole(file: Path) -> bool:
    """Whether the header is readable and matches the length of the file."""
    try:
        # Reads the header only, which holds the lengths of all tensors.
        with safe_open(file, framework="np"):
            return True
    except SafetensorError:
        return False


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


_TEXT = "2 + 2 = 4, isn't it?\n\tüber 你好"
_WORD = "2 + 2"
_MESSAGES = [{"role": "user", "content": "How much is 2 + 2?"}]


def tokenizer(situation: Situation) -> Iterator[Finding]:
    """Text survives encoding and decoding, and every id has a row in the embedding."""
    args = situation.args
    if args is None or not _is_folder(args.hf_checkpoint):
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
    elif _WORD not in back:  # without its files, transformers returns an empty tokenizer
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
    """The chat template renders, if prompts use it."""
    args = situation.args
    if args is None or not args.apply_chat_template or not _is_folder(args.hf_checkpoint):
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
    """The first row has the keys that the flags name. The data source checks later rows."""
    args = situation.args
    if args is None:
        return
    keys = args.input_key, args.label_key
    if args.prompt_data is not None and args.load_debug_rollout_data is None:
        for source in parse_sources(args.prompt_data):
            yield from _row(f"--prompt-data {source.name}".rstrip(), source.path, *keys)
    for dataset in vars(args).get("eval_datasets") or ():
        yield from _row(f"evaluation {dataset.name}", dataset.path, *keys)


def _row(what: str, path: str, input_key: str, label_key: str | None) -> Iterator[Finding]:
    try:
        row: dict[str, Any] | None = next(itertools.islice(read_file(path), 1), None)
    except (DataError, OSError, ImportError) as error:
        yield fail(what, str(error), "")
        return
    if row is None:
        yield fail(what, f"{path}: has no rows", "")
        return
    has = f"the first row of {Path(path).name} has {', '.join(map(str, row))}"
    if prompt_key_of(row, input_key) is None:
        yield fail(what, f"{has}, not {input_key}", "name its prompt with --input-key")
    elif label_key is not None and label_key not in row:
        yield fail(what, f"{has}, not {label_key}", "name its label with --label-key")
    else:
        yield ok(what, has)


def _is_folder(path: str | None) -> bool:
    return path is not None and Path(path).is_dir()


# Bytes that must stay free for logs and metrics.
_SPARE = 1024**3


def disk_space(situation: Situation) -> Iterator[Finding]:
    """Every output folder is writable, and has room for two of its largest output."""
    if situation.args is None:
        return
    shape: ModelShape | None
    try:
        shape = read_shape(situation.args)
    except PlanError:
        shape = None
    for place, outputs in _by_place(plan_files(situation.args, shape)).items():
        what = " and ".join(dict.fromkeys(output.what for output in outputs))
        if any(f"{place} cannot be written" in problem for problem in situation.problems):
            continue  # already reported with its flag
        if not os.access(place, os.W_OK):
            yield fail("disk", f"{place} cannot be written ({what})", "name another folder, or change its rights")
            continue
        # Twice: the old output is deleted after the new one is complete.
        needed = _SPARE + 2 * sum(output.bytes or 0 for output in outputs)
        free = shutil.disk_usage(place).free
        value = f"{size(free)} free at {place} for {what}"
        if free < needed:
            yield fail("disk", f"{value}, two of each take {size(needed)}", "free space, or write elsewhere")
        else:
            yield ok("disk", value)


def _by_place(outputs: list[Output]) -> dict[Path, list[Output]]:
    """Outputs by the nearest folder that exists."""
    places: dict[Path, list[Output]] = {}
    for output in outputs:
        place = Path(output.where).absolute()
        while not place.is_dir():
            place = place.parent
        places.setdefault(place, []).append(output)
    return places


# In the order of the output.
CHECKS: tuple[Check, ...] = (
    machine_checks.python_version,
    machine_checks.packages,
    machine_checks.device,
    machine_checks.driver,
    machine_checks.kernels,
    machine_checks.memory,
    machine_checks.processors,
    machine_checks.infiniband,
    machine_checks.host_name,
    machine_checks.open_files,
    machine_checks.shared_memory,
    machine_checks.ports,
    arguments,
    notices,
    hooks,
    weights,
    resume,
    tokenizer,
    chat_template,
    first_row,
    disk_space,
    machine_checks.imports,
    machine_checks.device_works,
)
