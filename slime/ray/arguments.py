"""The whole command line: the argument groups of every room, parsed, resolved and checked before anything starts.

Here because this is wiring: ``slime.config`` knows how to parse but no room, and a room knows its own flags only. Must
stay importable without torch, ray, megatron and sglang: ``train.py --help`` answers in about a second.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slime.algorithms.arguments import AlgorithmArgs
from slime.backends.megatron_utils import arguments as megatron
from slime.backends.megatron_utils import checkpoint_source, model_shape
from slime.backends.sglang_utils import arguments as sglang
from slime.backends.sglang_utils.namespace import read_engine
from slime.backends.sglang_utils.server_args import check_user_flags
from slime.batch import arguments as batch
from slime.config import arguments as command
from slime.config import check as config_check
from slime.config import parse as config_parse
from slime.config import resolve as config_resolve
from slime.config.groups import unsupported_flags
from slime.config.parse import AddArguments
from slime.data import arguments as data
from slime.hooks.load import check_hooks
from slime.observability import arguments as observability
from slime.rollout import arguments as rollout
from slime.rollout.eval_config import build_eval_datasets
from slime.utils import accelerator
from slime.utils.errors import ConfigError, SlimeError

__all__ = ["ClusterArgs", "SyncArgs", "parse_args"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterArgs:
    """Cluster."""

    train_backend: Literal["megatron"] = field(default="megatron", metadata={"help": "Training backend."})
    actor_num_nodes: int = field(default=1, metadata={"help": "Nodes of the trainer."})
    actor_num_gpus_per_node: int = field(
        default=8, metadata={"help": "Trainer ranks on each of its nodes. Without a GPU a slot is one CPU process."}
    )
    rollout_num_gpus: int | None = field(default=None, metadata={"help": "Device slots for inference engines."})
    rollout_num_gpus_per_engine: int = field(default=1, metadata={"help": "Tensor-parallel size of one engine."})
    num_gpus_per_node: int = field(default=8, metadata={"help": "Devices of a node that hosts engines."})
    train_env_vars: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "JSON object of environment variables for trainer processes."}
    )
    debug_rollout_only: bool = field(default=False, metadata={"help": "Generate and score only; start no trainer."})
    debug_train_only: bool = field(default=False, metadata={"help": "Train only; start no engine and no router."})
    placement_timeout: float = field(
        default=600.0, metadata={"help": "Seconds to wait until Ray has the requested devices."}
    )
    trainer_start_timeout: float = field(
        default=1800.0, metadata={"help": "Seconds until the model is built and its checkpoint is loaded."}
    )
    rollout_timeout: float = field(default=14400.0, metadata={"help": "Seconds one rollout or evaluation may take."})
    train_timeout: float = field(default=14400.0, metadata={"help": "Seconds training on one rollout may take."})


@dataclass(frozen=True)
class SyncArgs:
    """Weight synchronisation."""

    update_weight_buffer_size: int = field(
        default=512 * 1024**2, metadata={"help": "Largest bucket of weights sent at once, in bytes."}
    )
    update_weights_interval: int = field(default=1, metadata={"help": "Send weights to the engines every N rollouts."})
    check_weight_update_equal: bool = field(
        default=False,
        metadata={"help": "After every sync compare a checksum of each engine tensor with the trainer's tensor."},
    )
    weight_sync_timeout: float = field(default=600.0, metadata={"help": "Seconds one weight sync may take."})


def _groups(modules: Iterable[Any]) -> list[type]:
    """The groups that each ``arguments`` module exports, in its order."""
    return [getattr(module, name) for module in modules for name in module.__all__]


GROUPS: list[type] = [
    *_groups((command,)),
    ClusterArgs,
    SyncArgs,
    *_groups((data, rollout, batch)),
    AlgorithmArgs,
    *_groups((megatron, sglang, observability)),
]


def parse_args(
    add_custom_arguments: AddArguments | None = None,
    argv: Sequence[str] | None = None,
    *,
    is_async: bool = False,
) -> Namespace:
    """Parse, resolve and check the command line.

    Args:
        is_async: the driver is ``train_async.py``; becomes ``args.is_async``.
        add_custom_arguments: receives the parser before slime's flags are added, may add flags, and returns it.
        argv: defaults to ``sys.argv[1:]``.

    Exits with status 2 and every problem in one message when the command cannot work.
    """
    try:
        args = config_parse.parse(
            sys.argv[1:] if argv is None else argv,
            GROUPS,
            read_engine=read_engine,
            add_arguments=add_custom_arguments,
        )
        args.is_async = is_async
        config_resolve.resolve(args)
        config_check.check(args, (lambda args: unsupported_flags(args, GROUPS), *_RULES))
        _tell(args)
        args.eval_datasets = build_eval_datasets(args)
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return args


def _tell(args: Namespace) -> None:
    """Log what was decided for the user; under --strict-args a warning is an error."""
    warnings = [str(notice) for notice in args.notices if notice.level == "warning"]
    if args.strict_args and warnings:
        raise ConfigError([f"{text} (an error because of --strict-args)" for text in warnings])
    for notice in args.notices:
        logger.log(logging.WARNING if notice.level == "warning" else logging.INFO, "%s", notice)


def _files(args: Namespace) -> Iterator[str]:
    """Data files are looked at now, not when the first epoch or evaluation reaches them."""
    from slime.data.prompts import check_prompt_file

    if args.prompt_data is not None and args.load_debug_rollout_data is None:
        yield from check_prompt_file("--prompt-data", args.prompt_data)
    for dataset in build_eval_datasets(args) if args.eval_prompt_data else ():
        yield from check_prompt_file("--eval-prompt-data", dataset.path)


def _reward_type(args: Namespace) -> Iterator[str]:
    from slime.rollout.rm_hub import known_rm_types

    known = known_rm_types()
    if args.rm_type is not None and args.rm_type.removeprefix("boxed_") not in known:
        yield f"--rm-type {args.rm_type} is unknown. Use one of {', '.join(sorted(known))}, or --custom-rm-path."


def _checksums(args: Namespace) -> Iterator[str]:
    if not args.check_weight_update_equal or args.debug_train_only:
        return
    if not accelerator.current().is_cpu or args.rollout_num_gpus_per_engine > 1:
        yield (
            "--check-weight-update-equal compares tensors of engines on a CPU with one device per engine only, "
            "so far: drop it here. The weight version is verified after every sync in any case."
        )


_RULES: tuple[config_check.Rule, ...] = (
    model_shape.check_against_hf,
    checkpoint_source.check_checkpoints,
    check_user_flags,
    check_hooks,
    _files,
    _reward_type,
    _checksums,
)
"""The rules that only other rooms know."""
