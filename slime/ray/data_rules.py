"""What follows from the data files, and rules about what stands in them: the first row, and rows enough for an epoch.

Called by ``slime.ray.arguments`` after the flags are resolved. Later rows are the data source's business. What cannot
be read at all is reported by :mod:`slime.ray.argument_rules`.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator

from slime.config import notices
from slime.data.arguments import PromptDataArgs
from slime.ray.rollout_rules import FULLY_ASYNC
from slime.rollout.arguments import DEFAULT_ROLLOUT_FUNCTION
from slime.utils.errors import DataError

__all__ = ["RULES", "chat_template"]


def _reads_prompts(args: Namespace) -> bool:
    """Whether our data source reads ``--prompt-data``; what a user's one makes of a file is his business."""
    is_ours = args.data_source_path == PromptDataArgs().data_source_path
    replays = args.load_debug_rollout_data is not None
    return is_ours and not replays and args.rollout_global_dataset and bool(args.prompt_data)


def _generates_from_text(args: Namespace) -> bool:
    """Whether our generation gets the prompts, not a function of the user."""
    is_ours = args.rollout_function_path.replace(":", ".") in (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC)
    return is_ours and args.custom_generate_function_path is None


def chat_template(args: Namespace) -> None:
    """D4: prompts that are messages get the template where nothing else could make text of them."""
    from slime.data.prompts import prompt_key_of, read_file

    if args.apply_chat_template or not _generates_from_text(args) or not _reads_prompts(args):
        return
    try:
        row = next(iter(read_file(args.prompt_data)), {})
    except (DataError, ImportError, OSError):
        return  # reported by the rules
    if args.multimodal_keys is not None or isinstance(row.get(prompt_key_of(row, args.input_key) or ""), list):
        args.apply_chat_template = True
        notices.warn(
            args, "--apply-chat-template", "not given, but prompts are lists of messages: the template is used"
        )


def _training_rows(args: Namespace) -> Iterator[str]:
    if _reads_prompts(args):
        keys = (args.input_key, args.label_key, args.tool_key)
        needs_text = _generates_from_text(args) and not args.apply_chat_template
        yield from _first_row("--prompt-data", args.prompt_data, keys, needs_text=needs_text)


def _evaluation_rows(args: Namespace) -> Iterator[str]:
    if args.eval_function_path != DEFAULT_ROLLOUT_FUNCTION:
        return
    for dataset in args.eval_datasets:
        needs_text = dataset.custom_generate_function_path is None and not dataset.apply_chat_template
        keys = (dataset.input_key or args.input_key, dataset.label_key, dataset.tool_key)
        yield from _first_row(f"evaluation set {dataset.name}", dataset.path, keys, needs_text=needs_text)


def _first_row(
    where: str, path: str, keys: tuple[str, str | None, str | None], *, needs_text: bool = False
) -> Iterator[str]:
    """D4: what the keys of prompt, label and tools name is in the first row, and the prompt can be generated from.

    Args:
        needs_text: no function and no template turns another prompt into text.
    """
    from slime.data.prompts import open_prompts, read_file

    try:
        next(itertools.islice(read_file(path), 1))
    except (DataError, ImportError, OSError, StopIteration):
        return
    maker, rows = open_prompts(
        path,
        None,
        prompt_key=keys[0],
        label_key=keys[1],
        tool_key=keys[2],
        metadata_key="",
        apply_chat_template=False,
        apply_chat_template_kwargs=None,
    )
    try:
        (first,) = maker.make([next(rows())])
    except DataError as error:
        yield f"{where}: {error}."
        return
    if needs_text and not isinstance(first.sample.prompt, str):
        kind = type(first.sample.prompt).__name__
        kind = "lists of messages: use --apply-chat-template" if kind == "list" else f"{kind}, not text: use text"
        yield f"{where}: {path}: prompts are {kind}, or a --custom-generate-function-path that handles them."


def _epoch(args: Namespace) -> Iterator[str]:
    """A23."""
    from slime.data.prompts import read_file

    wanted = args.rollout_batch_size
    if not _reads_prompts(args) or args.num_rollout is not None or args.num_epoch is None:
        return
    try:
        found = sum(1 for _ in itertools.islice(read_file(args.prompt_data), max(0, wanted)))
    except (DataError, ImportError, OSError):
        return
    if 0 < found < wanted:
        yield (
            f"--prompt-data {args.prompt_data} holds {found} rows, fewer than --rollout-batch-size {wanted}: an epoch "
            f"(--num-epoch {args.num_epoch}) would have no rollout. Use smaller batches, or --num-rollout N."
        )


RULES: tuple[Callable[[Namespace], Iterable[str]], ...] = (_training_rows, _evaluation_rows, _epoch)
