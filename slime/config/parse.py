"""From argv to one flat namespace: slime's and Megatron's flags come from groups, ``--sglang-*`` is collected raw.

Precedence: a flag on the command line > ``--custom-config-path`` YAML > the default. YAML values become parser defaults
*before* anything is derived, and are coerced to the type of the flag they name.

Every problem found here ends in one :class:`ConfigError`; a misspelled flag is never dropped.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from slime.config.groups import add_group
from slime.utils.errors import ConfigError

__all__ = ["build_parser", "parse"]

_SGLANG_PREFIXES = ("--sglang-", "--no-sglang-")

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, so that usage errors read like every other problem."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser(groups: Sequence[type], add_arguments: AddArguments | None = None) -> argparse.ArgumentParser:
    """The parser of ``train.py``. ``add_arguments`` is the user's hook: it may add flags before slime adds its own."""
    parser: argparse.ArgumentParser = _Parser(
        prog="train.py",
        description="Reinforcement learning of a language model. --sglang-<flag> passes any SGLang server flag on.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if add_arguments is not None:
        parser = add_arguments(parser)
    parser.add_argument(
        "--custom-config-path",
        metavar="FILE",
        help="YAML mapping of argument names to values. Explicit flags win; keys that are no flag become attributes.",
    )
    for group in groups:
        add_group(parser, group)
    return parser


def parse(
    argv: Sequence[str],
    groups: Sequence[type],
    *,
    sglang_flags: Callable[[], Collection[str]],
    add_arguments: AddArguments | None = None,
) -> argparse.Namespace:
    """Parse ``argv``.

    Args:
        sglang_flags: gives the option strings of the installed SGLang server (``--context-length``); asked only when
            there is a ``--sglang-*`` flag to check.

    Returns:
        The namespace before any derivation. ``sglang_argv`` holds the engine's own flags; each is also readable as
        ``args.sglang_<name>``.

    Raises:
        ConfigError: unknown flags (with the nearest match), bad values, an unreadable YAML file.
    """
    parser = build_parser(groups, add_arguments)
    own, engine = _split_sglang(argv, parser)
    _apply_yaml(parser, own)
    args, unknown = parser.parse_known_args(own)
    known = list(parser._option_string_actions)
    problems = [_unknown_flag(token, known) for token in unknown if token.startswith("-")]
    problems += [f"{token!r} is not the value of any flag." for token in unknown if not token.startswith("-")]
    if engine:
        problems += _unknown_engine_flags(engine, sglang_flags())
    if problems:
        raise ConfigError(problems)
    args.sglang_argv = engine
    for name, value in _engine_attributes(engine).items():
        setattr(args, name, value)
    return args


def _split_sglang(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Separate SGLang's own flags, prefix removed, from those that a parser of ours declares."""
    own: list[str] = []
    engine: list[str] = []
    target = own
    for token in argv:
        if token.startswith("--"):
            is_engine = token.startswith(_SGLANG_PREFIXES) and token.split("=")[0] not in parser._option_string_actions
            target = engine if is_engine else own
            if is_engine:
                token = token.replace("sglang-", "", 1)
        target.append(token)
    return own, engine


def _apply_yaml(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--custom-config-path")
    path = first.parse_known_args(list(argv))[0].custom_config_path
    if path is None:
        return
    if not Path(path).is_file():
        raise ConfigError(f"--custom-config-path {path}: there is no such file.")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"--custom-config-path {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--custom-config-path {path} must hold a mapping of argument names to values.")
    actions = {action.dest: action for action in parser._actions}
    defaults = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        defaults[name] = _coerce(actions[name], value, path) if name in actions else value
        if name in actions:
            actions[name].required = False
    parser.set_defaults(**defaults)


def _coerce(action: argparse.Action, value: Any, path: str) -> Any:
    """Give a YAML value the type of the flag it names: ``1e-5`` is a string in YAML 1.1 but a float here."""
    convert = action.type
    if value is None or not callable(convert) or isinstance(value, dict):
        return value
    try:
        result = [convert(str(item)) for item in value] if isinstance(value, list) else convert(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"--custom-config-path {path}: key {action.dest}: {value!r} does not fit: {error}") from None
    if action.choices is not None and result not in action.choices:
        choices = ", ".join(map(str, action.choices))
        raise ConfigError(f"--custom-config-path {path}: key {action.dest}: {result!r} is not one of {choices}.")
    return result


def _unknown_flag(token: str, known: Collection[str]) -> str:
    flag = token.split("=")[0]
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
    hint = f"Did you mean {near[0]}?" if near else "It is misspelled, or not supported yet."
    return f"unknown flag {flag}. {hint}"


def _unknown_engine_flags(engine: Sequence[str], known: Collection[str]) -> list[str]:
    problems = []
    for token in engine:
        flag = token.split("=")[0]
        if not flag.startswith("--") or flag in known or (flag.startswith("--no-") and "--" + flag[5:] in known):
            continue
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
        hint = f" Did you mean --sglang-{near[0][2:]}?" if near else ""
        problems.append(f"unknown flag --sglang-{flag[2:]}: the installed SGLang server has no {flag}.{hint}")
    return problems


def _engine_attributes(engine: Sequence[str]) -> dict[str, Any]:
    """``["--context-length", "512", "--enable-x"]`` -> ``{"sglang_context_length": 512, "sglang_enable_x": True}``."""
    found: dict[str, list[str]] = {}
    name = ""
    for token in engine:
        if token.startswith("--"):
            name, _, value = token[2:].partition("=")
            found[name] = [value] if value else []
        elif name:
            found[name].append(token)
    attributes: dict[str, Any] = {}
    for key, texts in found.items():
        is_negated = key.startswith("no-") and not texts
        attribute = "sglang_" + (key[3:] if is_negated else key).replace("-", "_")
        values = [yaml.safe_load(text) for text in texts]
        attributes[attribute] = (not is_negated) if not values else values[0] if len(values) == 1 else values
    return attributes
