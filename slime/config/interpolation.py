"""``${...}`` in a YAML file: the value at another place of the file, or of an environment variable.

    ${eval.defaults.top_p}          absolute path through mappings (and lists, by position)
    ${oc.env:DATA_DIR}              environment variable; ${oc.env:DATA_DIR,/data} with a default

A value that is nothing but one reference takes the referenced value with its type; otherwise the text is inserted.
"""

from __future__ import annotations

import os
import re
from typing import Any

from slime.utils.errors import ConfigError

__all__ = ["interpolate"]

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_ENV = "oc.env:"


def interpolate(root: dict[Any, Any], where: str) -> dict[Any, Any]:
    """A copy of ``root`` without references.

    Raises:
        ConfigError: a reference leads nowhere or to itself; ``where`` is the flag and the file.
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
    return _walk(found, root, where, (*trail, name))
