"""The YAML files that the command line names: read in one place, with errors that name the flag and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slime.utils.errors import ConfigError

__all__ = ["read_mapping"]


def read_mapping(flag: str, path: str) -> dict[Any, Any]:
    """The mapping in the YAML (or JSON) file ``path`` that ``flag`` names; an empty file is an empty mapping.

    Raises:
        ConfigError: there is no such file, it is not YAML, or its root is no mapping.
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
