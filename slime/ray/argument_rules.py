"""Rules and derivations that need more than one room: data files, rewards, evaluation sets, roles, checksums.

Called by ``slime.ray.arguments`` after the flags are resolved. The rooms are imported where they are used, because
``--help`` must not wait for them.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import resource
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from slime.backends.sglang_utils.topology import topology_of
from slime.config import notices
from slime.config.check.generation import MEDIA
from slime.config.groups import flag_of
from slime.config.roles import check_roles
from slime.rollout.arguments import DEFAULT_ROLLOUT_FUNCTION
from slime.rollout.eval_config import EvalDatasetConfig, unused_fields
from slime.utils import accelerator
from slime.utils.errors import ConfigError, DataError

__all__ = ["MACHINE_RULES", "RULES", "evaluation_hooks", "reward_type", "what_can_be_replaced"]


_MIN_OPEN_FILES = 1024
"""What Linux gives a process by default. With two engines of a tiny model one process has had 173 open."""
_REPLAY_FUNCTION = "slime.rollout.forge_load.generate_rollout"
_STREAMING_FUNCTION = "slime.rollout.sglang_streaming_rollout.generate_streaming"


def reward_type(args: Namespace) -> None:
    """D12: rows with labels and no word about rewards are graded as mathematics."""
    if not _needs_reward_type(args):
        return
    row = _first_row(args)
    if row is None or _says_how(args, row):
        return
    if _label(args, row) is not None:
        args.rm_type = "math"
        notices.warn(args, "--rm-type", "neither it nor --custom-rm-path is given: answers are graded as mathematics")


def what_can_be_replaced(args: Namespace) -> None:
    """A process that holds state is replaced by a checkpoint, or not at all."""
    trains = not args.debug_rollout_only
    if args.use_fault_tolerance and trains and args.save is None:
        text = "engines that die are replaced; a trainer rank that dies ends the run, because there is no --save"
        notices.info(args, "--use-fault-tolerance", text)


def _needs_reward_type(args: Namespace) -> bool:
    generates = not args.debug_train_only and args.loss_type != "sft_loss"
    is_ours = args.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION
    return generates and is_ours and args.rm_type is None and args.custom_rm_path is None


def _first_row(args: Namespace) -> dict[str, object] | None:
    """Row one of --prompt-data, None where there is none; why there is none is another rule's business."""
    from slime.data.prompts import read_file

    if args.prompt_data is None or not args.rollout_global_dataset:
        return None
    try:
        return next(itertools.islice(read_file(args.prompt_data), 1), None)
    except (DataError, ImportError, OSError):
        return None


def _label(args: Namespace, row: dict[str, object]) -> object:
    return row.get(args.label_key or "label")


def _says_how(args: Namespace, row: dict[str, object]) -> bool:
    metadata = row.get(args.metadata_key)
    return "rm_type" in metadata if isinstance(metadata, dict | str) else False


def _rewards(args: Namespace) -> Iterator[str]:
    """B48, B81: rewards are known before anything is generated."""
    from slime.rollout.rm_hub import known_rm_types

    known = known_rm_types()
    for flag, name in [
        ("--rm-type", args.rm_type),
        *((_at(item, "rm_type"), item.rm_type) for item in args.eval_datasets),
    ]:
        if name is not None and name.removeprefix("boxed_") not in known:
            yield f"{flag} {name} is unknown. Use one of {', '.join(sorted(known))}, or --custom-rm-path."
    if args.rm_type is not None and args.rm_type.removeprefix("boxed_") == "remote_rm" and args.rm_url is None:
        yield "--rm-type remote_rm needs --rm-url, the address of the service."
    if not _needs_reward_type(args) or args.custom_generate_function_path is not None:
        return  # a generate function may score its own samples
    row = _first_row(args)
    if row is not None and not _says_how(args, row):
        yield (
            f"--rm-type is required: the first row of --prompt-data {args.prompt_data} has neither a label nor "
            f"metadata.rm_type, so nothing says how to score a response. Give --rm-type or --custom-rm-path."
        )


def _files(args: Namespace) -> Iterator[str]:
    """Data files are looked at now, not when the first epoch or evaluation reaches them."""
    from slime.data.prompts import check_prompt_file

    if args.prompt_data is not None and args.load_debug_rollout_data is None and args.rollout_global_dataset:
        yield from check_prompt_file("--prompt-data", args.prompt_data)
    for dataset in args.eval_datasets:
        yield from check_prompt_file(_at(dataset, "path"), dataset.path)


def _stream(args: Namespace) -> Iterator[str]:
    """A slice from the end needs the length of the file."""
    from slime.data.prompts import parse_path

    if not args.streaming_data or args.prompt_data is None:
        return
    part = parse_path(args.prompt_data)[1]
    if part is not None and min(part.start or 0, part.stop or 0) < 0:
        yield (
            f"--prompt-data {args.prompt_data}: --streaming-data does not know where the file ends: give a slice "
            "without negative bounds."
        )


def _replay(args: Namespace) -> Iterator[str]:
    """Dumps that a rollout function replays need that function, and it needs them."""
    function, template = args.rollout_function_path, args.load_forge_rollout_data
    replays = function.replace(":", ".") == _REPLAY_FUNCTION
    if replays and template is None:
        yield f"--rollout-function-path {function} replays dumps: it needs --load-forge-rollout-data TEMPLATE."
    if template is not None and function == DEFAULT_ROLLOUT_FUNCTION:
        yield (
            f"--load-forge-rollout-data {template} is read by --rollout-function-path {_REPLAY_FUNCTION}: give both, "
            "or --load-debug-rollout-data to replay without engines."
        )


def _heartbeats(args: Namespace) -> Iterator[str]:
    if args.heartbeat_timeout != 0 and args.heartbeat_timeout < 1:
        yield (
            f"--heartbeat-timeout {args.heartbeat_timeout:g} is less than a healthy process may need: "
            "give at least 1 second, or 0 for no heartbeats."
        )


def _evaluation_fields(args: Namespace) -> Iterator[str]:
    for dataset in args.eval_datasets:
        for name in unused_fields(dataset):
            notices.info(args, _at(dataset, name), "only evaluation functions of users read it")
        for kind in dataset.multimodal_keys or {}:
            if kind not in MEDIA:
                yield f"{_at(dataset, 'multimodal_keys')}: {kind!r} is no kind of media; use {', '.join(MEDIA)}."


def evaluation_hooks(args: Namespace) -> Iterator[str]:
    """Functions that only ``--eval-config`` names."""
    from slime.hooks.load import check_hooks

    for dataset in args.eval_datasets:
        for name in ("custom_generate_function_path", "custom_rm_path"):
            path = getattr(dataset, name)
            if path is not None and path != getattr(args, name):
                hook = Namespace(**{name: path}, group_rm=args.group_rm)
                yield from (f"{_at(dataset, name)}: {problem}" for problem in check_hooks(hook))


def _at(dataset: EvalDatasetConfig, name: str) -> str:
    return f"--eval-config, set {dataset.name}, {name}" if dataset.is_from_file else "--eval-prompt-data"


def _first_model(args: Namespace) -> Iterator[str]:
    """Requests without a model name go to the first model."""
    is_ours = args.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION and args.custom_generate_function_path is None
    if args.sglang_config is None or args.debug_train_only or args.debug_rollout_only or not is_ours:
        return
    try:
        models = topology_of(args).models
    except ConfigError:  # reported by the rules of the file
        return
    if not models[0].updates_weights and any(model.updates_weights for model in models):
        yield (
            f"--sglang-config {args.sglang_config}: model {models[0].name} stands first, so rollouts are made by it, "
            "but its weights are never updated. Put the model that is trained first."
        )


def _checksums(args: Namespace) -> Iterator[str]:
    if not args.check_weight_update_equal or args.debug_train_only:
        return
    if not accelerator.current().is_cpu or _widest_engine(args) > 1:
        text = "engines of several devices, or on GPUs, are compared after the first sync only, with their checkpoint"
        if args.load is None:
            notices.info(args, "--check-weight-update-equal", text)
        else:
            notices.warn(args, "--check-weight-update-equal", f"no effect with --load: {text}")
    yield from ()


def _widest_engine(args: Namespace) -> int:
    """Most devices that one of the engines that receive weights has."""
    if args.rollout_external:
        infos = getattr(args, "rollout_external_engine_infos", None) or []
        return max((info["num_gpus"] for info in infos), default=1)
    try:
        trained = [model for model in topology_of(args).models if model.updates_weights]
    except ConfigError:  # reported by the rules of the file
        return 1
    widths = [group.num_gpus_per_engine for model in trained for group in model.groups if group.num_engines]
    return max(widths, default=1)


def _posters(args: Namespace) -> Iterator[str]:
    """Streams are read where they are used."""
    streams = (args.custom_generate_function_path or "").replace(":", ".") == _STREAMING_FUNCTION
    if args.use_distributed_post and (streams or args.debug_train_only):
        what = "streams" if streams else "a run without engines"
        notices.warn(args, "--use-distributed-post", f"no effect on {what}")
    yield from ()


def _transport(args: Namespace) -> Iterator[str]:
    if args.rollout_data_transport == "nixl" and importlib.util.find_spec("nixl") is None:
        yield (
            "--rollout-data-transport nixl needs the package nixl on every node: pip install nixl, or use object-store."
        )


_WRITTEN = ("output_dir", "save", "save_hf", "save_debug_rollout_data", "save_debug_train_data")


def _writable(args: Namespace) -> Iterator[str]:
    """H1: before hours of training end at the first checkpoint. How much room there is, ``slime doctor`` says."""
    for flag, path in ((flag_of(name), getattr(args, name)) for name in _WRITTEN):
        if not path:
            continue
        place = next(parent for parent in (Path(path), *Path(path).parents) if parent.is_dir())
        if not os.access(place, os.W_OK):
            yield f"{flag} {path}: {place} cannot be written: name another directory, or change its rights."


def _open_files(args: Namespace) -> Iterator[str]:
    """Before Ray fails in the middle of its start. How many are good, ``slime doctor`` says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MIN_OPEN_FILES:
        limit = f" (the hard limit is {hard}: the system's administrator raises it)" if 0 <= hard < 65536 else ""
        yield (
            f"ulimit -n is {soft}: a process may open that many files and sockets, and a run needs at least "
            f"{_MIN_OPEN_FILES}. Run ulimit -n 65536 in the shell that starts it{limit}."
        )


MACHINE_RULES: tuple[Callable[[Namespace], Iterable[str]], ...] = (_transport, _writable, _open_files)
"""What needs something of the machine that a run starts on."""

RULES: tuple[Callable[[Namespace], Iterable[str]], ...] = (
    _files,
    _stream,
    _replay,
    _rewards,
    _first_model,
    _heartbeats,
    _evaluation_fields,
    _checksums,
    _posters,
    check_roles,
)
