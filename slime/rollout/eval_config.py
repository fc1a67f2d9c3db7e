"""Evaluation sets: ``--eval-prompt-data NAME FILE`` becomes one configuration per set.

Called while arguments are parsed and by evaluation. What a set does not say comes from the ``--eval-*`` flags, then
from those of training. Reads no file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.utils.errors import ConfigError

__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs", "build_eval_datasets"]

_LEGACY_NAME = "aime"

_FALLBACKS: dict[str, tuple[str, ...]] = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "custom_rm_path": ("eval_custom_rm_path", "custom_rm_path"),
}
"""Field of a set -> attributes of ``args``; the first that is not None decides."""


@dataclass
class EvalDatasetConfig:
    """One evaluation set. Fields that are None are left to the engine or to the data."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.metadata_overrides is None:
            self.metadata_overrides = {}
        if not isinstance(self.metadata_overrides, Mapping):
            raise TypeError(
                f"evaluation set {self.name}: metadata_overrides must be a mapping, "
                f"not {type(self.metadata_overrides).__name__}"
            )

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Sets with equal keys read the same rows."""
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, metadata: Any) -> dict[str, Any]:
        """A copy of a sample's metadata with this set's reward type and overrides."""
        result = dict(metadata) if isinstance(metadata, Mapping) else {}
        if self.rm_type is not None:
            result["rm_type"] = self.rm_type
        return result | dict(self.metadata_overrides)


def build_eval_dataset_configs(
    args: Any, raw_config: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[EvalDatasetConfig]:
    """Complete each entry: its own value, else ``defaults``, else ``args``.

    Raises:
        ConfigError: an unknown key, or two sets of the same name.
    """
    names = {item.name for item in dataclasses.fields(EvalDatasetConfig)}
    _reject_unknown(defaults, names, "defaults")
    configs = []
    for entry in raw_config:
        _reject_unknown(entry, names, f"evaluation set {entry.get('name')}")
        values = dict(entry)
        for name in names - {"name", "path"}:
            if values.get(name) is None and defaults.get(name) is not None:
                values[name] = defaults[name]
        for name, attributes in _FALLBACKS.items():
            if values.get(name) is None:
                candidates = (getattr(args, attribute, None) for attribute in attributes)
                values[name] = next((value for value in candidates if value is not None), None)
        configs.append(EvalDatasetConfig(**values))
    seen = [config.name for config in configs]
    repeated = sorted({name for name in seen if seen.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"--eval-prompt-data names {', '.join(repeated)} more than once: every set needs its own name."
        )
    return configs


def build_eval_datasets(args: Any) -> list[EvalDatasetConfig]:
    """The sets of ``--eval-prompt-data NAME FILE [NAME FILE ...]``; a lone FILE gets the name ``aime``."""
    values = list(args.eval_prompt_data or [])
    if len(values) == 1:
        values.insert(0, _LEGACY_NAME)
    if len(values) % 2:
        raise ConfigError(f"--eval-prompt-data takes pairs NAME FILE, but got {len(values)} values: {' '.join(values)}")
    entries = [{"name": values[i], "path": values[i + 1]} for i in range(0, len(values), 2)]
    return build_eval_dataset_configs(args, entries, {})


def _reject_unknown(mapping: Mapping[str, Any], names: set[str], where: str) -> None:
    unknown = sorted(set(mapping) - names)
    if unknown:
        raise ConfigError(f"{where}: unknown key {', '.join(unknown)}; known keys: {', '.join(sorted(names))}")
