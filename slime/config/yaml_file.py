"""The YAML files that the command line names: read in one place, with errors that name the flag and the file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

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
#     ${eval.defaults.top_p}          absolute path through mappings (and lists, by position)
#     ${oc.env:DATA_DIR}              environment variable; ${oc.env:DATA_DIR,/data} with a default
#
# A value that is nothing but one reference takes the referenced value with its type. Otherwise the text is inserted.

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_ENV = "oc.env:"


def interpolate(root: dict[Any, Any], where: str) -> dict[Any, Any]:
    """A copy of ``root`` without references.

    Raises:
        ConfigError: a reference leads nowhere or to itself. ``where`` is the flag and the file.
    """
    return {key: _walk(value, root, where, ()) for key, value in root.items()}


def _walk(value: Any, root: dict[Any, Any], where: str, trail: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _walk(item, root, where, trail) for key, item in value.items()}
    if isinstance(value, list):
        return [_walk(item, root, where, trail) for item in value]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return _lookup(whole.group(1).strip(), root, where, trail)
    return _REFERENCE.sub(lambda match: str(_lookup(match.group(1).strip(), root, where, trail)), value)


def _lookup(name: str, root: dict[Any, Any], where: str, trail: tuple[str, ...]) -> Any:
    if name in trail:
        raise ConfigError(f"{where}: ${{{name}}} refers to itself ({' -> '.join((*trail, name))}).")
    if name.startswith(_ENV):
        variable, comma, default = name.removeprefix(_ENV).partition(",")
        value = os.environ.get(variable.strip(), default.strip() if comma else None)
        if value is None:
            raise ConfigError(f"{where}: ${{{name}}}: there is no environment variable {variable.strip()}.")
        return value
    found: Any = root
    for part in name.split("."):
        try:
            found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ConfigError(f"{where}: ${{{name}}} leads nowhere: there is no {part!r}.") from None
    # The value may hold references too. The trail finds cycles.
    return _walk(found, root, where, (*trail, name))
