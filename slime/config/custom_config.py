"""``--custom-config-path``: argument names and values in a YAML file, as typed as if they were flags.

Called by ``slime.config.parse`` before anything is derived. A key is the name of an argument or of its flag, with ``-``
or ``_``. Other keys become attributes of the namespace, for the user's functions. ``null`` leaves the
default.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from slime.config.groups import flag_of
from slime.config.notices import Notice
from slime.config.yaml_file import read_mapping
from slime.utils.errors import ConfigError

FLAG = "--custom-config-path"
_ENGINE_KEYS = ("sglang_", "router_")
# Read before the file, so they have no effect in it.
_ONLY_FLAGS = ("custom_config_path", "plan", "help")


@dataclass
class CustomConfig:
    """The content of the file.

    Attributes:
        defaults: values of arguments that flags have, under the names of the arguments.
        extra: values that no flag has.
        engine_words: the engine's values as flags of the command line.
    """

    path: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    engine_words: list[str] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


class _Target(NamedTuple):
    """The argument of a key. ``is_off``: the key is a switch that turns it off."""

    action: argparse.Action
    is_off: bool


def read_custom_config(path: str, actions: Sequence[argparse.Action]) -> CustomConfig:
    """The values of the file ``path`` by ``actions``. Empty without a path.

    Raises:
        ConfigError: the file cannot be read, or values do not fit their flags: every problem.
    """
    config = CustomConfig(path)
    if not path:
        return config
    targets = _targets(actions)
    problems: list[str] = []
    for key, value in read_mapping(FLAG, path).items():
        name = str(key).replace("-", "_")
        target = targets.get(name)
        if name in _ONLY_FLAGS:
            problems.append(f"{FLAG} {path}: key {key} has no effect in the file: use it on the command line.")
        elif target is not None:
            if value is None:
                continue
            try:
                config.defaults[target.action.dest] = _typed(target, value)
            except argparse.ArgumentTypeError as error:
                problems.append(f"{FLAG} {path}: key {key}: {error}.")
            except ValueError as error:
                problems.append(f"{FLAG} {path}: key {key}: {value!r} {error}.")
        # The engine's flags are not declared here. Its parser reads them as words of the command line.
        elif name.startswith(_ENGINE_KEYS):
            config.engine_words += _as_flag(name, value)
        else:
            config.extra[name] = value
            # The name may be a typo of a flag.
            if near := difflib.get_close_matches(name, targets, n=1, cutoff=0.85):
                text = f"nothing of slime reads the key {key}; did you mean {near[0]}?"
                config.notices.append(Notice("warning", f"{FLAG} {path}", text))
    if problems:
        raise ConfigError(problems)
    return config


def overwritten_keys(args: argparse.Namespace) -> Iterator[str]:
    """Rule over the resolved arguments: a key cannot set a value that slime derives."""
    for name, value in args.custom_keys.items():
        if vars(args)[name] != value:
            yield (
                f"{FLAG} {args.custom_config_path}: key {name}: {value!r} cannot be set, it follows from the flags "
                f"({vars(args)[name]!r}). Leave it out."
            )


def _targets(actions: Sequence[argparse.Action]) -> dict[str, _Target]:
    """Every key that means an argument: its name, and the spellings of its flag."""
    targets: dict[str, _Target] = {}
    for action in actions:
        turns_off = isinstance(action, argparse._StoreFalseAction)
        for spelling in action.option_strings:
            is_negation = isinstance(action, argparse.BooleanOptionalAction) and spelling.startswith("--no-")
            targets[spelling.lstrip("-").replace("-", "_")] = _Target(action, turns_off or is_negation)
    # The name of an argument takes precedence over the spelling of another flag.
    return targets | {action.dest: _Target(action, False) for action in actions}


def _typed(target: _Target, value: Any) -> Any:
    """``value`` with the type of its flag: ``1e-5`` is a string in YAML 1.1 but a float here.

    Raises:
        ValueError, argparse.ArgumentTypeError: how it does not fit.
    """
    action, convert = target.action, target.action.type
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        # True for a switch such as --disable-x sets the argument to False.
        return _as_bool(value) is not target.is_off
    if action.nargs in ("+", "*"):
        return [_single(action, item) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, dict) and "json" in getattr(convert, "__name__", ""):
        return value
    if isinstance(value, list) and action.metavar == "PATTERN":  # written as a list on the command line too
        value = str(value)
    return _single(action, value)


def _single(action: argparse.Action, value: Any) -> Any:
    convert = action.type if callable(action.type) else str
    if isinstance(value, list | dict) or value is None:
        raise ValueError("is not one value")
    # YAML reads on, off, yes and no as truth values.
    if convert is str and isinstance(value, bool):
        raise ValueError("is a truth value in YAML: write the word in quotes")
    try:
        result = convert(str(value))
    except ValueError:
        kind = "a whole number" if convert is int else "a number" if convert is float else "valid"
        raise ValueError(f"is not {kind}") from None
    if action.choices is not None and result not in action.choices:
        raise ValueError(f"is not one of {', '.join(map(str, action.choices))}")
    return result


def _as_bool(value: Any) -> bool:
    """A truth value, or its word.

    Raises:
        ValueError: it is neither.
    """
    # ``bool("false")`` would be true.
    truth = value if isinstance(value, bool) else yaml.safe_load(str(value).lower())
    if not isinstance(truth, bool):
        raise ValueError("is neither true nor false")
    return truth


def _as_flag(name: str, value: Any) -> list[str]:
    flag = flag_of(name)
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            return ["--no-" + flag.removeprefix("--")]
        case list():
            return [flag, *map(str, value)]
        case dict():
            return [flag, json.dumps(value)]
        case _:
            return [f"{flag}={value}"]
