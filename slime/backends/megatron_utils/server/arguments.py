"""Flags of the log-prob server, values that it forces on others, and rules. Standard library only."""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from slime.config import groups
from slime.config.groups import add_group, flag_of, from_args
from slime.utils.errors import ConfigError
from slime.utils.misc import flag

ENTRY = "slime.backends.megatron_utils.server.megatron_server"
"""The module that starts the server."""


@dataclass(frozen=True)
class TeacherServerArgs:
    """Log-prob (teacher) server, a separate entry point."""

    teacher_host: str = flag("127.0.0.1", "Address that the server listens on. Anyone who can reach it can use it.")
    teacher_port: int = flag(7999, "Port of the server.")
    teacher_warmup_port: int = flag(7999, "Port of the server while it warms up, on loopback.")
    teacher_warmup_timeout_s: int = flag(3000, "Seconds the warm-up request may take.")
    teacher_sample_reduction_chunk_size: int = flag(4096, "Rows of logits sampled from at a time.")
    teacher_label_reduction_chunk_size: int = flag(
        4096, "Rows of logits whose labels' log-probs are gathered at a time."
    )
    megatron_server_max_length: int = flag(0, "Refuse requests with more tokens; 0 means no limit.")
    megatron_server_update_timeout_s: float = flag(3600, "Seconds a weight update from files may take.")
    megatron_server_warmup: bool | None = flag(True, "Send a request to itself before serving.")


# Flags whose defaults the environment may replace: TEACHER_PORT is that of --teacher-port.
_FROM_ENVIRONMENT: dict[str, Callable[[str], Any]] = {
    "teacher_port": int,
    "teacher_warmup_port": int,
    "teacher_warmup_timeout_s": int,
    "megatron_server_max_length": int,
    "megatron_server_update_timeout_s": float,
    "megatron_server_warmup": lambda text: {"1": True, "true": True, "0": False, "false": False}[text.lower()],
}

# Values of a model that only scores; they replace those of the training run's flags.
_FORCED: dict[str, Any] = {
    "debug_train_only": True,
    "use_kl_loss": False,
    "kl_coef": 0.0,
    "use_opd": False,
    "use_critic": False,
    "keep_old_actor": False,
    "offload_train": False,
    "use_dynamic_batch_size": False,
    "use_wandb": False,
    "no_load_optim": True,
    "no_load_rng": True,
    "only_train_params_name_list": ["nothing_to_train"],
}

_MAY_BE_ZERO = ("megatron_server_max_length",)


def add_megatron_server_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the server's flags to a parser of users'. Returns it."""
    add_group(parser, TeacherServerArgs)
    return parser


def configure_megatron_server_args(args: Namespace) -> Namespace:
    """Take defaults from the environment, and force the values of a server. Changes ``args`` in place, and returns it.

    Raises:
        ConfigError: a variable of the environment that holds no such value.
    """
    given: frozenset[str] = vars(args).get("given", frozenset())  # absent if another parser made the arguments
    for name, convert in _FROM_ENVIRONMENT.items():
        text = os.environ.get(name.upper())
        if not text or name in given:
            continue
        try:
            setattr(args, name, convert(text))
        except (ValueError, KeyError):
            raise ConfigError(f"{name.upper()}={text} in the environment is not a value of {flag_of(name)}.") from None
    vars(args).update(_FORCED)
    return args


def server_problems(args: Namespace) -> Iterator[str]:
    """Rule over the resolved arguments."""
    for name, value in asdict(from_args(TeacherServerArgs, args)).items():
        if isinstance(value, bool | str) or value is None:
            continue
        if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            least = "at least 0" if name in _MAY_BE_ZERO else "above 0"
            yield f"{flag_of(name)} {value} must be {least} ({name})."
    for name, value in vars(args).items():
        if value != _FORCED.get(name, value):
            yield f"{name} is {value!r}; in the log-prob server it must stay {_FORCED[name]!r}."


def unused(args: Namespace) -> Iterator[str]:
    """Rule of every other command: warn that the server's flags have no effect."""
    for item in fields(TeacherServerArgs):
        if item.name in args.given:
            groups.warn(args, flag_of(item.name), f"no effect: only python -m {ENTRY} reads it")
    yield from ()  # a rule is a generator


def validate_megatron_server_args(args: Namespace) -> None:
    """Raise every problem of :func:`server_problems` in one ``ConfigError``, which is a ``ValueError``."""
    problems = list(server_problems(args))
    if problems:
        raise ConfigError(problems)
