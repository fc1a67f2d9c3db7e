"""``config.json`` of a Hugging Face checkpoint: the file, and typed look-ups in its fields.

A rule reports the errors of :func:`load_model_config` (``slime.config.check.objective``). Derivations, other rules and
the plan treat a bad file as an empty one: :func:`read_model_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.models.family import Family, Switch
from slime.utils.errors import ConfigError

_MOST, _LARGEST = 2**40, 1e15  # up to 1e15 a float holds every whole number exactly

# Keys whose value must be an object.
_SECTIONS = (
    *("text_config", "vision_config", "quantization_config", "compression_config"),
    *("rope_scaling", "rope_parameters"),
)


def load_model_config(hf_checkpoint: str) -> dict[str, Any]:
    """Keys of the file.

    Raises:
        ConfigError: it is missing, or the file or a section of it is not a JSON object.
    """
    where = f"--hf-checkpoint {hf_checkpoint}"
    try:
        text = (Path(hf_checkpoint) / "config.json").read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{where}: cannot read config.json: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{where}: config.json is not text in UTF-8: {error}.") from None
    try:
        config = json.loads(text, parse_constant=_refuse)  # json would accept NaN and Infinity
    except ValueError as error:
        raise ConfigError(f"{where}: config.json is not valid JSON: {error}.") from None
    except RecursionError:
        raise ConfigError(
            f"{where}: config.json is nested too deeply to be read; a model's config has a few levels."
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: config.json does not hold a JSON object.")
    problems = [
        f"{where}: config.json has {name} {_shown(config[name])}; it must be a JSON object, or be left out."
        for name in _SECTIONS
        if config.get(name) is not None and not isinstance(config[name], dict)
    ]
    if problems:
        raise ConfigError(problems)
    return config


def _refuse(constant: str) -> Any:
    raise ValueError(f"it holds {constant}, which is no JSON number")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_model_config(hf_checkpoint: str | None) -> dict[str, Any]:
    """Keys of the file. Empty if it cannot be read."""
    if hf_checkpoint is None:
        return {}
    try:
        return load_model_config(hf_checkpoint)
    except ConfigError:
        return {}


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the language model: ``text_config`` in a multimodal model, otherwise all."""
    part = config.get("text_config") or config
    return part if isinstance(part, dict) else {}


class ConfigReader:
    """Typed look-ups in the fields of one model. Collects problems, so that one message lists all of them."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        self.config = config
        self.family = family
        self.problems: list[str] = []
        self.missing: list[str] = []

    @property
    def rope(self) -> Mapping[str, Any]:
        """``rope_parameters`` (transformers 5) or ``rope_scaling`` (4)."""
        value = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        return value if isinstance(value, Mapping) else {}

    @property
    def rope_type(self) -> str:
        return str(self.rope.get("rope_type") or self.rope.get("type") or "default")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        return bool(self.family.defaults.get(name, default) if value is None else value)

    def switch(self, value: Switch) -> bool:
        return self.flag(value) if isinstance(value, str) else value

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of ``names`` that is present or has a default of the family. Otherwise ``default``."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                value = self.family.defaults.get(name)  # null means the default, like a missing field
            if value is not None:
                return self._checked(name, value)
        if default is None:
            self.missing.append(names[0])  # the 1 lets the reader go on and collect all problems
            return 1
        return default

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        value = self.number(*names, default=default)
        if value != int(value) or not least <= value <= most:
            name = next((name for name in names if self.config.get(name) is not None), names[0])
            self.problems.append(f"has {name} {value:.12g}; it must be a whole number from {least} to {most}.")
            return max(1, least)
        return int(value)

    def items(self, name: str) -> list[Any]:
        """A list. Empty if the field is missing."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, list):
            self.problems.append(f"has {name} {value!r}; it must be a list.")
            return []
        return value or []

    def layer_kinds(self, name: str, num_layers: int) -> list[Any] | None:
        """A list with one entry per layer. None if the field is missing or has another length."""
        kinds = self.config.get(name)
        return kinds if isinstance(kinds, list) and len(kinds) == num_layers else None

    def rope_number(self, name: str, default: float | None = None) -> float:
        value = self.rope.get(name)
        if value is not None:
            return self._checked(name, value)
        if default is None:
            self.missing.append(f"{name} of its rope settings")
            return 1
        return default

    def _checked(self, name: str, value: Any) -> float:
        # bool is a subclass of int: true would pass as 1.
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problems.append(f"has {name} {value!r}; it must be a number.")
            return 1
        if abs(value) > _LARGEST:  # also infinity
            self.problems.append(f"has a {name} beyond {_LARGEST:.0e}; no model has such a number.")
            return 1
        return value
