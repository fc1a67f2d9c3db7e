"""Evaluation sets: ``--eval-config FILE`` or ``--eval-prompt-data NAME FILE`` become one configuration per set.

    eval:                                  # or this mapping itself is the root
      defaults: {top_p: 0.7}
      datasets:                            # a list of mappings with a name, or a mapping of names to mappings
        - {name: gsm8k, path: gsm8k.jsonl, n_samples_per_eval_prompt: 4}

Called while arguments are parsed. A field comes from the set itself, else from ``defaults``, else from the
``--eval-*`` flags, else from those of training. A field that is null counts as given and ends the search.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.config.yaml_file import interpolate, read_mapping
from slime.utils.errors import ConfigError

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
    "multimodal_keys": ("multimodal_keys",),
}
"""Field of a set -> attributes of ``args``; the first that is not None decides."""


_FLAGS_ONLY = "--eval-prompt-data"


@dataclass
class EvalDatasetConfig:
    """One evaluation set. Fields that are None are left to the engine or to the data.

    Attributes:
        min_eval_samples: with fewer finished samples the evaluation is an error.
        eval_task_timeout: seconds that one prompt may take; its samples then count as failed.
        eval_early_stop_remaining, eval_early_stop_idle_timeout: a set ends when at most so many samples are missing and
            none has finished for so many seconds.
    """

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict[str, Any] | None = None
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
    min_eval_samples: int | None = None
    app_service: str | None = None
    eval_task_timeout: int | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None
    remote_environment: dict[str, Any] | None = None
    is_from_file: bool = False

    def __post_init__(self) -> None:
        if self.min_eval_samples is not None and self.min_eval_samples < 1:
            raise ValueError(f"evaluation set {self.name}: min_eval_samples {self.min_eval_samples} must be at least 1")
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
        # Overrides come last: they may replace the reward type.
        return result | dict(self.metadata_overrides)


_UNUSED = ("app_service", "message_processor", "reward_model", "remote_environment")
"""Fields for evaluation functions of users; ours does not read them."""


def build_eval_datasets(args: Any) -> list[EvalDatasetConfig]:
    """The sets of ``--eval-config``, else of ``--eval-prompt-data NAME FILE ...``; a lone FILE is called ``aime``.

    Raises:
        ConfigError: with every problem of the file or the flag.
    """
    path = vars(args).get("eval_config")  # users' evaluation functions pass other namespaces
    if path is not None:
        entries, defaults = _read(path)
        return build_eval_dataset_configs(args, entries, defaults, source=f"--eval-config {path}")
    values = list(args.eval_prompt_data or [])
    if len(values) == 1:
        values.insert(0, _LEGACY_NAME)
    if len(values) % 2:
        raise ConfigError(f"--eval-prompt-data takes pairs NAME FILE, but got {len(values)} values: {' '.join(values)}")
    entries = [{"name": values[i], "path": values[i + 1]} for i in range(0, len(values), 2)]
    return build_eval_dataset_configs(args, entries, {})


def build_eval_dataset_configs(
    args: Any, raw_config: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any], *, source: str = _FLAGS_ONLY
) -> list[EvalDatasetConfig]:
    """Complete each entry: its own value, else ``defaults``, else ``args``.

    Args:
        source: the flag or file of the entries, for messages.

    Raises:
        ConfigError: unknown keys, values of the wrong kind, a set without name or path, two sets of the same name.
    """
    entries = [dict(entry) for entry in raw_config]
    problems = _unknown_keys(defaults, f"{source}, defaults", without=("name", "path"))
    for number, entry in enumerate(entries, start=1):
        place = f"{source}, set {entry.get('name') or f'number {number}'}"
        problems += _unknown_keys(entry, place)
        problems += [f"{place}: {name} is missing." for name in ("name", "path") if not entry.get(name)]
    seen = [str(entry.get("name")) for entry in entries if entry.get("name")]
    repeated = sorted({name for name in seen if seen.count(name) > 1})
    if repeated:
        problems.append(f"{source} names {', '.join(repeated)} more than once: every set needs its own name.")
    if problems:
        raise ConfigError(problems)
    return [_complete(vars(args), entry, defaults, source) for entry in entries]


def unused_fields(dataset: EvalDatasetConfig) -> list[str]:
    """Fields that were given and that the built-in evaluation does not read."""
    return [name for name in _UNUSED if getattr(dataset, name) is not None]


def _complete(
    flags: Mapping[str, Any], entry: Mapping[str, Any], defaults: Mapping[str, Any], source: str
) -> EvalDatasetConfig:
    values = {**defaults, **entry}
    for name, attributes in _FALLBACKS.items():
        if name not in values:
            candidates = (flags.get(attribute) for attribute in attributes)
            values[name] = next((value for value in candidates if value is not None), None)
    place = f"{source}, set {entry['name']}"
    problems: list[str] = []
    hints = typing.get_type_hints(EvalDatasetConfig)
    # Only values of the set and of the defaults: values of flags are already converted.
    for name in [name for name in values if name in defaults or name in entry]:
        try:
            values[name] = _typed(values[name], hints[name])
        except ValueError as error:
            problems.append(f"{place}: {name} {values[name]!r} {error}.")
    smallest = {"n_samples_per_eval_prompt": 1, "max_response_len": 1, "min_eval_samples": 1, "temperature": 0}
    smallest |= {"eval_task_timeout": 1, "eval_early_stop_remaining": 1, "eval_early_stop_idle_timeout": 0}
    if (values.get("eval_early_stop_remaining") is None) != (values.get("eval_early_stop_idle_timeout") is None):
        problems.append(f"{place}: eval_early_stop_remaining and eval_early_stop_idle_timeout only work together.")
    for name, bound in smallest.items():
        if values.get(name) is not None and not isinstance(values[name], str) and values[name] < bound:
            problems.append(f"{place}: {name} {values[name]} must be at least {bound}.")
    if isinstance(top_p := values.get("top_p"), float) and "top_p" in (*defaults, *entry) and not 0 < top_p <= 1:
        problems.append(f"{place}: top_p {top_p} must be above 0 and at most 1.")
    if problems:
        raise ConfigError(problems)
    return EvalDatasetConfig(**values, is_from_file=source != _FLAGS_ONLY)


def _typed(value: Any, hint: Any) -> Any:
    """Convert ``value`` to the type of the field."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    wanted = typing.get_origin(members[0]) or members[0]
    if value is None or wanted is Any:
        return value
    # YAML 1.1 reads 1e-5 as text. A bool is an int in Python, but not a number here.
    if wanted is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            raise ValueError("must be a number") from None
    if wanted is int and isinstance(value, float | str):
        return _integer(value)
    # A single stop string or token id.
    if wanted is list and isinstance(value, str | int):
        return [value]
    is_wrong_number = wanted is int and isinstance(value, bool)
    if not isinstance(value, wanted) or is_wrong_number:
        words = {int: "an integer", str: "text", bool: "true or false", list: "a list", dict: "a mapping"}
        raise ValueError(f"must be {words[wanted]}")
    return value


def _integer(value: float | str) -> int:
    try:
        number = float(value)
    except ValueError:
        raise ValueError("must be an integer") from None
    if not number.is_integer():
        raise ValueError("must be an integer")
    return int(number)


def _read(path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(entries, defaults) of an ``--eval-config`` file."""
    where = f"--eval-config {path}"
    root = interpolate(read_mapping("--eval-config", path), where)
    config = root.get("eval", root)
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: eval must be a mapping with datasets, not {config!r}.")
    defaults = config.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise ConfigError(f"{where}: defaults must be a mapping, not {defaults!r}.")
    datasets = config.get("datasets")
    if not datasets:
        raise ConfigError(f"{where}: datasets is missing or empty: list at least one set with name and path.")
    if isinstance(datasets, dict):
        wrong = [name for name, entry in datasets.items() if not isinstance(entry, dict | None)]
        entries = [{"name": name, **(entry or {})} for name, entry in datasets.items() if name not in wrong]
    elif isinstance(datasets, list):
        wrong = [entry for entry in datasets if not isinstance(entry, dict)]
        entries = [entry for entry in datasets if isinstance(entry, dict)]
    else:
        raise ConfigError(f"{where}: datasets must be a list or a mapping of names, not {datasets!r}.")
    if wrong:
        raise ConfigError(f"{where}: a set is a mapping with name and path, not {wrong[0]!r}.")
    return entries, defaults


def _unknown_keys(mapping: Mapping[str, Any], where: str, without: Iterable[str] = ()) -> list[str]:
    names = {item.name for item in dataclasses.fields(EvalDatasetConfig)} - {"is_from_file", *without}
    unknown = sorted(str(key) for key in mapping if key not in names)
    if not unknown:
        return []
    return [f"{where}: unknown key {', '.join(unknown)}; known keys: {', '.join(sorted(names))}."]
