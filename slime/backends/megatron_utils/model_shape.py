"""The shape of the model: read from the Hugging Face config.json, checked against the flags that were given.

Called by the command-line check and by the trainer. Imports neither torch nor megatron nor transformers.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.families.base import Family
from slime.backends.megatron_utils.families.registry import FAMILIES
from slime.utils.errors import ConfigError

__all__ = ["Llama3Rope", "ModelShape", "check_against_hf", "read_hf_config", "read_shape"]


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1 rope scaling, as in ``rope_parameters`` of its config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides which tensors the model has and what they compute."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float
    rotary_base: float
    rotary_percent: float
    is_tied: bool
    max_position_embeddings: int
    llama3_rope: Llama3Rope | None = None

    @property
    def kv_channels(self) -> int:
        """Megatron's name of ``head_dim``."""
        return self.head_dim

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def padded_vocab_size(self, multiple: int) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up to a multiple of ``multiple``."""
        return math.ceil(self.vocab_size / multiple) * multiple


@dataclass(frozen=True)
class _Field:
    """One line of the flag <-> config.json table; a path with a dot looks into a nested mapping."""

    shape: str
    dest: str
    flag: str
    hf: tuple[str, ...]


_FIELDS = (
    _Field("num_layers", "num_layers", "--num-layers", ("num_hidden_layers",)),
    _Field("hidden_size", "hidden_size", "--hidden-size", ("hidden_size",)),
    _Field("ffn_hidden_size", "ffn_hidden_size", "--ffn-hidden-size", ("intermediate_size",)),
    _Field("num_attention_heads", "num_attention_heads", "--num-attention-heads", ("num_attention_heads",)),
    _Field("num_query_groups", "num_query_groups", "--num-query-groups", ("num_key_value_heads",)),
    _Field("head_dim", "kv_channels", "--kv-channels", ("head_dim",)),
    _Field("vocab_size", "vocab_size", "--vocab-size", ("vocab_size",)),
    _Field("norm_epsilon", "layernorm_epsilon", "--norm-epsilon", ("rms_norm_eps",)),
    _Field("rotary_base", "rotary_base", "--rotary-base", ("rope_parameters.rope_theta", "rope_theta")),
    _Field("rotary_percent", "rotary_percent", "--rotary-percent", ("partial_rotary_factor",)),
    _Field("max_position_embeddings", "", "", ("max_position_embeddings",)),
)

_SWITCHES = (
    # dest of a switch, the property of the family that it asserts, what its absence means
    ("qk_layernorm", "has_qk_norm", "queries and keys have no norm"),
    ("add_qkv_bias", "has_qkv_bias", "queries, keys and values have no bias"),
)


def read_hf_config(hf_checkpoint: str) -> dict[str, Any]:
    """``config.json`` of a Hugging Face directory.

    Raises:
        ConfigError: the file is missing or is not a JSON object.
    """
    path = Path(hf_checkpoint) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--hf-checkpoint {hf_checkpoint}: cannot read config.json: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"--hf-checkpoint {hf_checkpoint}: config.json is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--hf-checkpoint {hf_checkpoint}: config.json does not hold a JSON object.")
    return config


def read_shape(hf_checkpoint: str) -> ModelShape:
    """The shape of the model in ``hf_checkpoint``.

    Raises:
        ConfigError: the architecture or one of its options is not supported, or a field is missing.
    """
    config = read_hf_config(hf_checkpoint)
    problems = _unsupported(hf_checkpoint, config)
    if problems:
        raise ConfigError(problems)
    family = FAMILIES[config["model_type"]]
    values = {item.shape: _value(config, family, item) for item in _FIELDS}
    missing = [f"{item.hf[-1]}" for item in _FIELDS if values[item.shape] is None]
    if missing:
        raise ConfigError(f"--hf-checkpoint {hf_checkpoint}: config.json lacks {', '.join(missing)}.")
    return ModelShape(
        model_type=family.model_type,
        is_tied=bool(config.get("tie_word_embeddings", family.defaults["tie_word_embeddings"])),
        llama3_rope=_llama3_rope(config),
        **values,
    )


def check_against_hf(args: Namespace) -> list[str]:
    """Every flag that contradicts ``--hf-checkpoint``: flag, its value, the config field and its value."""
    if args.hf_checkpoint is None or not (Path(args.hf_checkpoint) / "config.json").is_file():
        return []  # reported with the other missing files
    try:
        shape = read_shape(args.hf_checkpoint)
    except ConfigError as error:
        return error.problems
    where = f"config.json of --hf-checkpoint {args.hf_checkpoint}"
    problems = []
    for item in _FIELDS:
        given = getattr(args, item.dest) if item.dest else None
        actual = getattr(shape, item.shape)
        if given is not None and not math.isclose(given, actual, rel_tol=1e-6):
            problems.append(f"{item.flag} {given} differs from {item.hf[-1]} {actual} in {where}: drop the flag.")
    for dest, attribute, absence in _SWITCHES:
        if getattr(args, dest) and not getattr(shape.family, attribute):
            flag = "--" + dest.replace("_", "-")
            problems.append(f"{flag} differs from model_type {shape.model_type} in {where}: {absence} there.")
    if args.untie_embeddings_and_output_weights and shape.is_tied:
        problems.append(f"--untie-embeddings-and-output-weights differs from tie_word_embeddings true in {where}.")
    if args.use_rope_scaling and shape.llama3_rope is None:
        problems.append(f"--use-rope-scaling differs from {where}, which has no llama3 rope scaling.")
    return problems


def _value(config: Mapping[str, Any], family: Family, item: _Field) -> Any:
    for path in item.hf:
        value: Any = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    if item.hf[-1] in family.defaults:
        return family.defaults[item.hf[-1]]
    match item.shape:
        case "head_dim":
            return config["hidden_size"] // config["num_attention_heads"]
        case "num_query_groups":
            return config.get("num_attention_heads")
        case "rotary_percent":
            return 1.0
        case "max_position_embeddings":
            return 4096
        case _:
            return None


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``rope_parameters`` (transformers 5) or ``rope_scaling`` (4)."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = _rope(config)
    return rope.get("rope_type") or rope.get("type") or "default"


def _llama3_rope(config: Mapping[str, Any]) -> Llama3Rope | None:
    if _rope_type(config) != "llama3":
        return None
    rope = _rope(config)
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _unsupported(hf_checkpoint: str, config: Mapping[str, Any]) -> list[str]:
    where = f"--hf-checkpoint {hf_checkpoint}: config.json has"
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        return [f"{where} model_type {model_type!r}; supported are {', '.join(sorted(FAMILIES))}."]
    family = FAMILIES[model_type]
    problems = [
        f"{where} {name} {config[name]}: {meaning} are not supported."
        for name, meaning in family.refuses
        if config.get(name)
    ]
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"{where} hidden_act {config['hidden_act']!r}; only silu is supported.")
    rope_types = {"default"} | ({"llama3"} if family.supports_llama3_rope else set())
    if _rope_type(config) not in rope_types:
        problems.append(f"{where} rope type {_rope_type(config)!r}; supported are {', '.join(sorted(rope_types))}.")
    return problems
