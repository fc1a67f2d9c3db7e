"""The whole command line: the argument groups of every room, parsed, resolved and checked before anything starts.

``slime.config`` can parse but imports no room, and a room has only its own flags, so they meet here. Must stay
importable without torch, ray, megatron and sglang: ``train.py --help`` answers in about a second.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence

from slime.algorithms import arguments as algorithms
from slime.algorithms.estimators import find_estimator
from slime.backends.fsdp_utils import arguments as fsdp
from slime.backends.megatron_utils import argument_rules as megatron_rules
from slime.backends.megatron_utils import arguments as megatron
from slime.backends.megatron_utils import precision_rules
from slime.backends.megatron_utils.server import arguments as server
from slime.backends.sglang_utils import rules as sglang_rules
from slime.backends.sglang_utils.namespace import EngineArgs, read_engine
from slime.backends.training import checkpoint_source, export_files
from slime.batch import arguments as batch
from slime.config import check as config_check
from slime.config import parse as config_parse
from slime.config import resolve as config_resolve
from slime.config.arguments import (
    AsyncArgs,
    CiArgs,
    ClusterArgs,
    CommandArgs,
    ConvenienceArgs,
    FaultToleranceArgs,
    NetworkArgs,
    SyncArgs,
)
from slime.config.groups import defaults_of, groups_in, unsupported_flags
from slime.config.help_text import HINT
from slime.config.parse import AddArguments
from slime.config.run_config import RunConfig
from slime.data import arguments as data
from slime.hooks.load import check_hooks
from slime.observability import arguments as observability
from slime.ray import rules as wiring_rules
from slime.rollout import arguments as rollout
from slime.rollout import rules as rollout_rules
from slime.rollout.eval_config import build_eval_datasets
from slime.utils.errors import ConfigError, SlimeError
from slime.weight_sync import rules as sync_rules

__all__ = [
    "GROUPS",
    "ClusterArgs",
    "SyncArgs",
    "machine_problems",
    "parse_args",
    "parse_only",
    "run_config",
    "validate_sglang_args",
]

logger = logging.getLogger(__name__)


GROUPS: list[type] = [
    CommandArgs,
    ClusterArgs,
    SyncArgs,
    AsyncArgs,
    *groups_in(data, rollout, batch, algorithms),
    ConvenienceArgs,
    *groups_in(megatron, fsdp),
    EngineArgs,
    *groups_in(observability),
    FaultToleranceArgs,
    NetworkArgs,
    CiArgs,
    server.TeacherServerArgs,
]
GROUPS.append(megatron.other_flags(GROUPS))  # last: it leaves out the flags that rooms declare


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
        return None, _sentences(error)
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
        return None, [*problems, *_sentences(error), *hints]
    # After all derivations: rules read derived values. All rules run, so one start shows all problems.
    problems += config_check.find_problems(args, (*RULES, *(HOOK_RULES if loads_hooks else ())))
    if args.strict_args:  # last: rules add notices as well
        warnings = (notice for notice in args.notices if notice.level == "warning")
        problems += [f"{notice} (an error because of --strict-args)." for notice in warnings]
    return args, problems + (hints if problems else [])


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


def run_config(args: Namespace) -> RunConfig:
    """The configuration of a run from its resolved arguments."""
    return RunConfig.of(args, estimator=find_estimator(args.advantage_estimator))


def machine_problems(args: Namespace) -> list[str]:
    """Requirements of the run that this machine does not meet."""
    return [problem for rule in MACHINE_RULES for problem in rule(args)]


def _sentences(error: SlimeError) -> list[str]:
    return list(getattr(error, "problems", [str(error)]))


# Derivations of other rooms, in order, after those of slime.config.resolve.
STEPS: tuple[config_resolve.Step, ...] = (
    *megatron_rules.STEPS,
    wiring_rules.other_model_flags,
    *sglang_rules.STEPS,
    *rollout_rules.STEPS,
    wiring_rules.replaceable_processes,
)

# Derivations that ask external engines over the network.
LIVE_STEPS: tuple[config_resolve.Step, ...] = sglang_rules.LIVE_STEPS

RULES: tuple[config_check.Rule, ...] = (
    *wiring_rules.TRAINER_RULES,
    checkpoint_source.check_checkpoints,
    export_files.check_export,
    *sglang_rules.RULES,
    *wiring_rules.RULES,
    *rollout_rules.RULES,
    *wiring_rules.ROLE_RULES,
    *sync_rules.RULES,
    *wiring_rules.CI_RULES,
    server.unused,
)

# Requirements on the machine that starts the run. A plan works on any machine and lists them separately.
MACHINE_RULES: tuple[config_check.Rule, ...] = (
    precision_rules.low_precision_here,
    *sglang_rules.MACHINE_RULES,
    *wiring_rules.MACHINE_RULES,
)

# Rules that load functions of the user.
HOOK_RULES: tuple[config_check.Rule, ...] = (
    check_hooks,
    *rollout_rules.HOOK_RULES,
    *wiring_rules.ROLE_HOOK_RULES,
)
