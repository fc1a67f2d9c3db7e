"""The YAML files that the command line names: read in one place, with errors that name the flag and the file.

``--custom-config-path`` has argument names and values, as typed as if they were flags. ``slime.config.parse`` reads it
before anything is derived. A key is the name of an argument or of its flag, with ``-`` or ``_``. Other keys become
attributes of the namespace, for the user's functions. ``null`` leaves the default.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from slime.config.groups import Notice, flag_of, json_object
from slime.utils.errors import ConfigError


def read_mapping(flag: str, path: str) -> dict[Any, Any]:
    """The mapping in the YAML (or JSON) file ``path`` that ``flag`` names. An empty file is an empty mapping.

    Raises:
        ConfigError: the file is missing, is not YAML, or has a root other than a mapping.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{flag} {path}: there is no such file.")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path} is not a text file in UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{flag} {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{flag} {path} must hold a mapping of names to values, not a {type(values).__name__}.")
    return values


# ``${...}`` in a YAML file: the value at another place of the file, or of an environment variable.
#
#     ${eval.defaults.top_p}          absolute path through mappings (and lists, by position: ``a.0`` or ``a[0]``)
#     ${.top_p} ${..top_p}            relative path: beside the value, one level up
#     ${oc.env:DATA_DIR}              environment variable; ${oc.env:DATA_DIR,/data} with a default, null for none
#     ${oc.env:DIR,${eval.dir}}       a reference inside another one
#
# A value that is nothing but one reference takes the referenced value with its type. Otherwise the text is inserted.

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")  # an innermost one
_ENV = "oc.env:"
_Place = tuple[Any, ...]


def interpolate(root: dict[Any, Any], where: str) -> dict[Any, Any]:
    """A copy of ``root`` without references.

    Raises:
        ConfigError: a reference leads nowhere or to itself. ``where`` is the flag and the file.
    """
    return {key: _walk(value, (key,), root, where, ()) for key, value in root.items()}


def _walk(value: Any, at: _Place, root: dict[Any, Any], where: str, trail: tuple[str, ...]) -> Any:
    """``value`` without references. ``at``: the keys that lead to it."""
    if isinstance(value, dict):
        return {key: _walk(item, (*at, key), root, where, trail) for key, item in value.items()}
    if isinstance(value, list):
        return [_walk(item, (*at, number), root, where, trail) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    while match := _REFERENCE.search(value):
        found = _lookup(match[1].strip(), at, root, where, trail)
        if match[0] == value:
            return found
        if "${" in str(found):
            raise ConfigError(f"{where}: {match[0]} is {found!r}, which has a reference itself: write its value.")
        value = f"{value[: match.start()]}{found}{value[match.end() :]}"
    return value


def _lookup(name: str, at: _Place, root: dict[Any, Any], where: str, trail: tuple[str, ...]) -> Any:
    if name.startswith(_ENV):
        variable, comma, default = name.removeprefix(_ENV).partition(",")
        value = os.environ.get(variable.strip(), default.strip() if comma else None)
        if value is None:
            raise ConfigError(f"{where}: ${{{name}}}: there is no environment variable {variable.strip()}.")
        return None if value == "null" else value
    path = name.lstrip(".")
    levels = len(name) - len(path)
    keys = path.replace("[", ".").replace("]", "").lstrip(".").split(".")
    parts = (*(at[: max(0, len(at) - levels)] if levels else ()), *keys)
    place = ".".join(map(str, parts))
    if place in trail:
        raise ConfigError(f"{where}: ${{{name}}} refers to itself ({' -> '.join((*trail, place))}).")
    found: Any = root
    for part in parts:
        try:
            found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ConfigError(f"{where}: ${{{name}}} leads nowhere: there is no {part!r}.") from None
    # The value may hold references too. The trail finds cycles.
    return _walk(found, parts, root, where, (*trail, place))


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
    action = target.action
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        # True for a switch such as --disable-x sets the argument to False.
        return _as_bool(value) is not target.is_off
    if action.nargs in ("+", "*"):
        return [_single(action, item) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, dict) and action.type is json_object:
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
