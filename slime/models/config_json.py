"""``config.json`` of a Hugging Face checkpoint.

A rule reports what :func:`load_model_config` raises (``slime.config.check.generation``). For derivations, other rules
and the plan a bad file is an empty one: :func:`read_model_config`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.utils.errors import ConfigError

MOST_LAYERS = 10_000
"""More layers than that are a mistake, and lists of them would fill the memory."""

_SECTIONS = (
    *("text_config", "vision_config", "quantization_config", "compression_config"),
    *("rope_scaling", "rope_parameters"),
)
"""Keys whose value, if any, is an object."""


def load_model_config(hf_checkpoint: str) -> dict[str, Any]:
    """Keys of the file.

    Raises:
        ConfigError: it is missing, is no JSON object, or a section of it is none.
    """
    where = f"--hf-checkpoint {hf_checkpoint}"
    try:
        text = (Path(hf_checkpoint) / "config.json").read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{where}: cannot read config.json: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{where}: config.json is not text in UTF-8: {error}.") from None
    try:
        config = json.loads(text, parse_constant=_refuse)
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
    """Keys of the file; empty where there is none, or none that can be read."""
    if hf_checkpoint is None:
        return {}
    try:
        return load_model_config(hf_checkpoint)
    except ConfigError:
        return {}


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the language model: those of ``text_config`` in a model that sees, too, else all."""
    part = config.get("text_config") or config
    return part if isinstance(part, dict) else {}
