"""Rules and derivations about prompts, rewards and rollout functions: data files are read before anything starts.

Used by ``slime.ray.arguments`` after the general flags are resolved. Rules judge the first row of a file, and whether
it has enough rows for an epoch. The data source reports later rows. Rollout functions of users check their needs.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterator

from slime.config import groups
from slime.config.check.objective import MEDIA
from slime.config.groups import flag_of
from slime.config.resolve.cluster import has_other_terms, is_group_relative
from slime.data.arguments import PromptDataArgs
from slime.data.prepare import PromptMaker
from slime.data.prompts import open_prompts, prompt_key_of
from slime.data.rows import check_prompt_file, read_file
from slime.hooks import check_hooks, load_function
from slime.rollout.arguments import DEFAULT_ROLLOUT_FUNCTION
from slime.rollout.eval_config import EvalDatasetConfig, unused_fields
from slime.utils.errors import ConfigError, DataError
from slime.utils.prompt_sources import parse_path, parse_sources

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
_REPLAY = "slime.rollout.forge_load.generate_rollout"
_STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"
_SUPERVISED = "slime.rollout.sft_rollout.generate_rollout"
_READERS = {
    "rollout_longest_first": DEFAULT_ROLLOUT_FUNCTION,
    "over_sampling_batch_size": DEFAULT_ROLLOUT_FUNCTION,
    "loss_mask_type": _SUPERVISED,
    "replay_schedule": "slime.rollout.scheduled_rollout.generate_rollout",
}
_UNREADABLE = (DataError, ImportError, OSError)
"""Errors of reading a data file. ``_files`` reports them, the other rules skip the file."""


def _dotted(path: str | None) -> str:
    return (path or "").replace(":", ".")


def _at(dataset: EvalDatasetConfig, name: str) -> str:
    return f"--eval-config, set {dataset.name}, {name}" if dataset.is_from_file else "--eval-prompt-data"


def _first_row(path: str) -> dict[str, object] | None:
    """The first row of a data file; None if the file is empty or cannot be read."""
    try:
        return next(itertools.islice(read_file(path), 1), None)
    except _UNREADABLE:
        return None


def _paths(args: Namespace) -> list[str]:
    return [source.path for source in parse_sources(args.prompt_data)]


def _reads_prompts(args: Namespace) -> bool:
    """Whether slime's own data source reads ``--prompt-data``."""
    is_ours = args.data_source_path == PromptDataArgs().data_source_path
    replays = args.load_debug_rollout_data is not None
    return is_ours and not replays and args.rollout_global_dataset and bool(args.prompt_data)


def _generates_from_text(args: Namespace) -> bool:
    """Whether slime's own generation receives the prompts, not a function of the user."""
    is_ours = _dotted(args.rollout_function_path) in (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC)
    return is_ours and args.custom_generate_function_path is None


# ---- rewards


def reward_type(args: Namespace) -> None:
    """Grade answers as mathematics if rows have labels and no flag or row names a kind of reward."""
    rows = [row for _, row in _rows_without_reward_type(args)]
    if rows and all(row.get(args.label_key or "label") is not None for row in rows):
        args.rm_type = "math"
        groups.warn(args, "--rm-type", "neither it nor --custom-rm-path is given: answers are graded as mathematics")


def _rows_without_reward_type(args: Namespace) -> Iterator[tuple[str, dict[str, object]]]:
    """Path and first row of each source that slime must score, if neither a flag nor the row names a reward."""
    generates = not args.debug_train_only and args.loss_type != "sft_loss"
    is_ours = args.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION
    if not (generates and is_ours and args.rm_type is None and args.custom_rm_path is None):
        return
    if args.prompt_data is None or not args.rollout_global_dataset:
        return
    for path in _paths(args):
        row = _first_row(path)
        metadata = row.get(args.metadata_key) if row is not None else None
        if row is not None and not (isinstance(metadata, dict | str) and "rm_type" in metadata):
            yield path, row


def _rewards(args: Namespace) -> Iterator[str]:
    """Kinds of rewards exist and have an address if they need one."""
    from slime.rollout.rm_hub import known_rm_types  # heavy: graders import sympy

    known = known_rm_types()
    given = [("--rm-type", args.rm_type), *((_at(item, "rm_type"), item.rm_type) for item in args.eval_datasets)]
    for flag, name in given:
        if name is not None and name.removeprefix("boxed_") not in known:
            yield f"{flag} {name} is unknown. Use one of {', '.join(sorted(known))}, or --custom-rm-path."
    if args.rm_type is not None and args.rm_type.removeprefix("boxed_") == "remote_rm" and args.rm_url is None:
        yield "--rm-type remote_rm needs --rm-url, the address of the service."
    # A generate function may score its own samples.
    for path, _ in _rows_without_reward_type(args) if args.custom_generate_function_path is None else ():
        yield (
            f"--rm-type is required: the first row of --prompt-data {path} has neither a label nor "
            f"metadata.rm_type, so the reward of a response is undefined. Give --rm-type or --custom-rm-path."
        )


def _single_samples(args: Namespace) -> Iterator[str]:
    """Relative to itself the reward of a single sample is zero: something else must give a gradient."""
    trains = not args.debug_rollout_only and args.num_rollout != 0
    # functions of the user may return several samples for one
    is_alone = args.n_samples_per_prompt == 1 and _generates_from_text(args)
    if trains and is_alone and is_group_relative(args) and not has_other_terms(args):
        yield (
            "--n-samples-per-prompt 1 makes every group-relative advantage zero, so nothing would be learned: "
            "use at least 2, or --disable-rewards-normalization."
        )


# ---- data files


def chat_template(args: Namespace) -> None:
    """Use the chat template for prompts that are messages, if slime generates from them."""
    if args.apply_chat_template or not _generates_from_text(args) or not _reads_prompts(args):
        return
    rows = [row for row in map(_first_row, _paths(args)) if row is not None]
    messages = (isinstance(row.get(prompt_key_of(row, args.input_key) or ""), list) for row in rows)
    if rows and (args.multimodal_keys is not None or any(messages)):
        args.apply_chat_template = True
        text = "not given, but prompts are lists of messages: the template is used"
        groups.warn(args, "--apply-chat-template", text)


def _files(args: Namespace) -> Iterator[str]:
    if args.prompt_data is not None and args.load_debug_rollout_data is None and args.rollout_global_dataset:
        for path in _paths(args):
            yield from check_prompt_file("--prompt-data", path)
    for dataset in args.eval_datasets:
        yield from check_prompt_file(_at(dataset, "path"), dataset.path)


def _tracing(args: Namespace) -> Iterator[str]:
    if args.trace_endpoint is not None and not args.trace_endpoint.startswith(("http://", "https://")):
        yield f"--trace-endpoint {args.trace_endpoint} must be an address such as http://host:4318 (OTLP over HTTP)."
    if args.trace_endpoint is not None and vars(args).get("router_enable_trace"):
        yield (
            "--router-enable-trace with --trace-endpoint: the router would start a trace of its own for every request, "
            "without the spans of the sample. Leave it out: the router passes the header of the trace on."
        )
    if not 0 <= args.trace_share <= 1:
        yield f"--trace-share {args.trace_share} must be from 0 to 1."


def _stream(args: Namespace) -> Iterator[str]:
    for path in _paths(args) if args.streaming_data and args.prompt_data is not None else ():
        part = parse_path(path)[1]
        if part is None or min(part.start or 0, part.stop or 0) >= 0:
            continue
        yield (
            f"--prompt-data {path}: a slice from the end needs the length of the file, which "
            "--streaming-data does not know: give a slice without negative bounds."
        )


def _training_rows(args: Namespace) -> Iterator[str]:
    if _reads_prompts(args):
        keys = (args.input_key, args.label_key, args.tool_key)
        needs_text = _generates_from_text(args) and not args.apply_chat_template
        for path in _paths(args):
            yield from _check_row("--prompt-data", path, keys, needs_text=needs_text)


def _evaluation_rows(args: Namespace) -> Iterator[str]:
    if args.eval_function_path != DEFAULT_ROLLOUT_FUNCTION:
        return
    for dataset in args.eval_datasets:
        generates = dataset.custom_generate_function_path or args.custom_generate_function_path
        needs_text = generates is None and not dataset.apply_chat_template
        keys = (dataset.input_key or args.input_key, dataset.label_key, dataset.tool_key)
        yield from _check_row(f"evaluation set {dataset.name}", dataset.path, keys, needs_text=needs_text)


def _check_row(
    where: str, path: str, keys: tuple[str, str | None, str | None], *, needs_text: bool = False
) -> Iterator[str]:
    """The first row has the keys of prompt, label and tools, and a prompt that can be generated from.

    Args:
        needs_text: neither a function nor a template turns another kind of prompt into text.
    """
    if _first_row(path) is None:
        return  # ``_files`` reports it
    # No tokenizer: keys and kinds of values are checked without loading the checkpoint.
    settings = PromptMaker(None, prompt_key=keys[0], label_key=keys[1], tool_key=keys[2], metadata_key="")
    maker, rows = open_prompts(path, settings)
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
    wanted = args.rollout_batch_size
    if not _reads_prompts(args) or args.num_rollout is not None or args.num_epoch is None:
        return
    try:
        # Reads no further than necessary: data files may be large.
        rows = itertools.chain.from_iterable(map(read_file, _paths(args)))
        found = sum(1 for _ in itertools.islice(rows, max(0, wanted)))
    except _UNREADABLE:
        return
    if 0 < found < wanted:
        yield (
            f"--prompt-data {args.prompt_data} holds {found} rows, fewer than --rollout-batch-size {wanted}: an epoch "
            f"(--num-epoch {args.num_epoch}) would have no rollout. Use smaller batches, or --num-rollout N."
        )


# ---- rollout functions


def _replay(args: Namespace) -> Iterator[str]:
    """The rollout function that replays dumps and the flag with the dumps need each other."""
    function, template = args.rollout_function_path, args.load_forge_rollout_data
    if _dotted(function) == _REPLAY and template is None:
        yield f"--rollout-function-path {function} replays dumps: it needs --load-forge-rollout-data TEMPLATE."
    if template is not None and function == DEFAULT_ROLLOUT_FUNCTION:
        yield (
            f"--load-forge-rollout-data {template} is read by --rollout-function-path {_REPLAY}: give both, "
            "or --load-debug-rollout-data to replay without engines."
        )


def _evaluation(args: Namespace) -> Iterator[str]:
    for dataset in args.eval_datasets:
        for name in unused_fields(dataset):
            groups.info(args, _at(dataset, name), "only evaluation functions of users read it")
        if dataset.rm_type is not None and (path := dataset.custom_rm_path) is not None:
            text = f"no effect, because {path} scores the set: custom_rm_path: null lets the type decide"
            groups.warn(args, f"{_at(dataset, 'rm_type')} {dataset.rm_type}", text)
        for kind in dataset.multimodal_keys or {}:
            if kind not in MEDIA:
                flag = _at(dataset, "multimodal_keys")
                yield f"{flag}: {kind!r} is not a kind of media; use {', '.join(MEDIA)}."
    evaluates = bool(args.eval_datasets) and args.eval_interval is not None and not args.debug_train_only
    if evaluates and _dotted(args.eval_function_path) == FULLY_ASYNC:
        yield (
            f"--eval-function-path {args.eval_function_path} cannot evaluate: its worker never stops. Give "
            f"--eval-function-path {DEFAULT_ROLLOUT_FUNCTION}."
        )


def _supervised(args: Namespace) -> Iterator[str]:
    if _dotted(args.rollout_function_path) != _SUPERVISED or args.load_debug_rollout_data is not None:
        return
    if args.n_samples_per_prompt != 1:
        yield (
            f"--n-samples-per-prompt {args.n_samples_per_prompt} must be 1: --rollout-function-path {_SUPERVISED} "
            "trains on every row once."
        )
    if not args.rollout_global_dataset:
        yield f"--rollout-function-path {_SUPERVISED} reads --prompt-data: drop --disable-rollout-global-dataset."
    if args.apply_chat_template:
        yield (
            f"--apply-chat-template makes text of the messages that --rollout-function-path {_SUPERVISED} masks turn "
            "by turn: drop it."
        )


def _http_workers(args: Namespace) -> Iterator[str]:
    streams = _dotted(args.custom_generate_function_path) == _STREAMING  # read in the process that generates
    if args.use_distributed_post and (streams or args.debug_train_only):
        place = "streams" if streams else "a run without engines"
        groups.warn(args, "--use-distributed-post", f"no effect on {place}")
    # Makes this a generator, as all rules are. This one only warns.
    yield from ()


def _of_another_function(args: Namespace) -> Iterator[str]:
    """Flags that one rollout function of slime reads, with another one of them."""
    path = _dotted(args.rollout_function_path)
    for name, reader in _READERS.items() if path.startswith("slime.rollout.") else ():
        if name in args.given and vars(args)[name] and path != reader:
            groups.warn(args, flag_of(name), f"no effect on --rollout-function-path {path}")
    yield from ()


# ---- functions of the user


def _evaluation_hooks(args: Namespace) -> Iterator[str]:
    """Functions that only ``--eval-config`` names."""
    for dataset in args.eval_datasets:
        for name in ("custom_generate_function_path", "custom_rm_path"):
            path = getattr(dataset, name)
            if path is not None and path != vars(args)[name]:
                hook = Namespace(**{name: path}, group_rm=args.group_rm)
                yield from (f"{_at(dataset, name)}: {problem}" for problem in check_hooks(hook))


def _returned_groups(args: Namespace) -> Iterator[str]:
    """A data source must take back the groups that a rollout did not finish."""
    from slime.rollout.data_source import RolloutDataSource  # heavy: imports torch

    if _dotted(args.rollout_function_path) == FULLY_ASYNC:
        cause = f"--rollout-function-path {FULLY_ASYNC}"
    elif args.partial_rollout:
        cause = "--partial-rollout"
    else:
        return
    try:
        source = load_function(args.data_source_path, "data_source")
    except ConfigError:  # check_hooks reports it
        return
    if getattr(source, "add_samples", None) is RolloutDataSource.add_samples:
        yield (
            f"--data-source-path {args.data_source_path} is read-only, but {cause} returns unfinished groups to it, "
            "which would be lost: use a source with a buffer, such as the default one."
        )


STEPS = (reward_type, chat_template)
RULES = (
    *(_files, _stream, _replay, _rewards, _single_samples, _tracing, _evaluation, _http_workers),
    *(_training_rows, _evaluation_rows, _epoch, _supervised, _of_another_function),
)
HOOK_RULES = (_evaluation_hooks, _returned_groups)
