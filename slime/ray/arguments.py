"""The whole command line: the argument groups of every room, parsed, resolved and checked before anything starts.

``slime.config`` can parse but imports no room, and a room has only its own flags, so they meet here. Must stay
importable without torch, ray, megatron and sglang: ``train.py --help`` answers in about a second.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence

from slime.backends.megatron_utils.server import arguments as server
from slime.backends.sglang_utils import rules as sglang_rules
from slime.backends.sglang_utils.namespace import read_engine
from slime.backends.training.rules import check_checkpoints
from slime.config import check as config_check
from slime.config import parse as config_parse
from slime.config import resolve as config_resolve
from slime.config.groups import defaults_of, unsupported_flags, with_values
from slime.config.parse import HINT, AddArguments
from slime.ray.rooms import GROUPS, HOOK_RULES, LIVE_STEPS, MACHINE_RULES, RULES, STEPS
from slime.ray.rules import TRAINER_RULES
from slime.rollout.eval_config import build_eval_datasets
from slime.utils.errors import ConfigError, SlimeError

__all__ = [
    "GROUPS",
    "machine_problems",
    "parse_args",
    "parse_only",
    "parse_server_args",
    "validate_sglang_args",
]

logger = logging.getLogger(__name__)

_SERVER_USAGE = "%(prog)s --hf-checkpoint DIR [--load DIR] [flag ...]"


def parse_args(
    add_custom_arguments: AddArguments | None = None,
    argv: Sequence[str] | None = None,
    *,
    is_async: bool = False,
) -> Namespace:
    """Parse, resolve and check the command line.

    Args:
        is_async: the driver is ``train_async.py``. The value of ``args.is_async``.
        add_custom_arguments: receives the parser before slime's flags are added, may add flags, and returns it.
        argv: defaults to ``sys.argv[1:]``.

    Exits with status 2 and every problem in one message when the command cannot work.
    """
    words = sys.argv[1:] if argv is None else argv
    args, problems = parse_only(words, add_custom_arguments=add_custom_arguments, is_async=is_async)
    if args is not None:
        problems += machine_problems(args)
        if argv is None:  # the driver may be a program of the user
            args.command_line = sys.argv
    if args is None or problems:
        print(f"error: {ConfigError(problems)}", file=sys.stderr)
        raise SystemExit(2)
    log_notices(args)
    return args


def log_notices(args: Namespace) -> None:
    """Log the notices of resolved arguments with their levels."""
    for notice in args.notices:
        logger.log(logging.WARNING if notice.level == "warning" else logging.INFO, "%s", notice)


def parse_only(
    argv: Sequence[str],
    *,
    add_custom_arguments: AddArguments | None = None,
    is_async: bool = False,
    loads_hooks: bool = True,
) -> tuple[Namespace | None, list[str]]:
    """:func:`parse_args` that returns the problems. Neither prints nor exits, except for ``--help``.

    Args:
        loads_hooks: load the user's functions, which may import anything, compare their signatures, and query external
            engines.

    Returns:
        The resolved arguments, or None if the words could not be read or resolved. Then every problem as a sentence.
    """
    try:
        args = config_parse.parse(
            argv,
            GROUPS,
            read_engine=read_engine,
            add_arguments=add_custom_arguments,
            program="train_async.py" if is_async else "train.py",
        )
    except SlimeError as error:
        return None, error.problems
    args.is_async = is_async
    args.command_line = ["train_async.py" if is_async else "train.py", *argv]
    # A required flag may be missing because it is misspelled. With --strict-args every notice is a problem anyway.
    hints = [str(notice) for notice in args.notices if HINT in notice.text and not args.strict_args]
    problems = list(unsupported_flags(args, GROUPS))  # before resolve(): given values, not derived ones
    try:
        sglang_rules.engine_width(args)  # before the steps that count engines
        sglang_rules.engine_devices(args)
        config_resolve.resolve(args, (*STEPS, *(LIVE_STEPS if loads_hooks else ())))
        args.eval_datasets = build_eval_datasets(args)
        args.eval_prompt_data = [part for item in args.eval_datasets for part in (item.name, item.path)] or None
    except SlimeError as error:
        return None, [*problems, *error.problems, *hints]
    # After all derivations: rules read derived values. All rules run, so one start shows all problems.
    problems += config_check.find_problems(args, (*RULES, *(HOOK_RULES if loads_hooks else ())))
    if args.strict_args:  # last: rules add notices as well
        warnings = (notice for notice in args.notices if notice.level == "warning")
        problems += [f"{notice} (an error because of --strict-args)." for notice in warnings]
    return args, problems + (hints if problems else [])


def parse_server_args(argv: Sequence[str]) -> Namespace:
    """The resolved arguments of the log-prob server.

    Raises:
        ConfigError: every problem with them.
    """
    args = config_parse.parse(
        argv, GROUPS, read_engine=read_engine, program=f"python -m {server.ENTRY}", usage=_SERVER_USAGE
    )
    problems = list(unsupported_flags(args, GROUPS))
    server.configure_megatron_server_args(args)
    # No weights are sent, and this transport needs no directory.
    args = with_values(args, is_async=False, debug_rollout_only=False, update_weight_transport="nccl")
    config_resolve.resolve(args, STEPS)
    server.configure_megatron_server_args(args)  # overrides values derived from flags of a training run
    args = with_values(args, eval_datasets=[])
    for rule in (server.server_problems, *TRAINER_RULES, check_checkpoints):
        problems += rule(args)
    if args.hf_checkpoint is None:
        problems.append("--hf-checkpoint is required: the directory with config.json and the tokenizer of the model.")
    if args.train_backend != "megatron":
        problems.append(f"--train-backend {args.train_backend}: the log-prob server runs on megatron only.")
    if problems:
        raise ConfigError(problems)
    return args


def validate_sglang_args(args: Namespace) -> None:
    """Derive and check the arguments of engines, for parsers of other programs. ``parse_args`` includes it.

    Args:
        args: changed in place. Missing flags get their defaults. Flags with other values count as given.

    Raises:
        ConfigError: with every problem.
    """
    defaults = read_engine([], ()).attributes | defaults_of(GROUPS) | {"notices": [], "world_size": 0}
    defaults["given"] = frozenset(name for name, value in vars(args).items() if value != defaults.get(name))
    for name, value in defaults.items():
        if name not in vars(args):
            setattr(args, name, value)
    sglang_rules.engine_width(args)
    for step in sglang_rules.STEPS:
        step(args)
    problems = [problem for rule in sglang_rules.RULES for problem in rule(args)]
    if problems:
        raise ConfigError(problems)


def machine_problems(args: Namespace) -> list[str]:
    """Requirements of the run that this machine does not meet."""
    return [problem for rule in MACHINE_RULES for problem in rule(args)]
