"""The shape of the model: what ``config.json`` says, what the flags say, and where they disagree.

One table for both. Importable without torch and megatron, so that the command line is checked before anything starts.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.utils.errors import ConfigError

__all__ = ["FAMILY_OF_MODEL_TYPE", "ModelShape", "check_against_hf", "model_shape", "read_hf_config"]

FAMILY_OF_MODEL_TYPE = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"}
"""``model_type`` of config.json -> module of ``families``."""


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides the parameters of a dense decoder.

    Attributes:
        rope_scaling: Llama 3's frequency scaling as in config.json, None for plain rotary embeddings.
        padded_vocab_size: rows of the embedding, ``vocab_size`` rounded up.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    norm_epsilon: float
    rotary_base: float
    vocab_size: int
    padded_vocab_size: int
    tie_embeddings: bool
    qk_layernorm: bool
    add_qkv_bias: bool
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None


def read_hf_config(path: str) -> dict[str, Any]:
    """``config.json`` of a Hugging Face directory, the text part of a multimodal one."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--hf-checkpoint {path}: cannot read {file}: {error.strerror}.") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"--hf-checkpoint {path}: {file} is not valid JSON: {error}.") from None
    return config.get("text_config", config)


def model_shape(args: Namespace) -> ModelShape:
    """The shape of the model in ``--hf-checkpoint``; flags that were given have been checked to agree with it."""
    config = read_hf_config(args.hf_checkpoint)
    values = _from_hf(config)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    values["padded_vocab_size"] = -(-values["vocab_size"] // multiple) * multiple
    return ModelShape(**values)


def check_against_hf(args: Namespace) -> Iterator[str]:
    """One problem per shape flag that contradicts the checkpoint's config.json."""
    try:
        config = read_hf_config(args.hf_checkpoint) if args.hf_checkpoint else None
    except ConfigError:
        return  # reported where the path is checked
    if config is None:
        return
    model_type = config.get("model_type")
    if model_type not in FAMILY_OF_MODEL_TYPE:
        known = ", ".join(sorted(FAMILY_OF_MODEL_TYPE))
        yield f"--hf-checkpoint {args.hf_checkpoint}: model_type {model_type!r} is not supported yet; known: {known}."
        return
    expected = _from_hf(config)
    for name, field in _HF_FIELDS.items():
        given = getattr(args, name)
        if given is not None and given != expected[name]:
            yield f"--{name.replace('_', '-')} {given} does not match {field} {expected[name]} of {args.hf_checkpoint}."
    yield from _check_switches(args, expected)


def _check_switches(args: Namespace, expected: dict[str, Any]) -> Iterator[str]:
    """Switches have no "not given": a checkpoint may only contradict those that were set."""
    if args.num_layers is None:
        return  # no shape flags at all: everything comes from config.json
    wrong = {
        "--qk-layernorm": (args.qk_layernorm, expected["qk_layernorm"]),
        "--add-qkv-bias": (args.add_qkv_bias, expected["add_qkv_bias"]),
        "--untie-embeddings-and-output-weights": (
            args.untie_embeddings_and_output_weights,
            not expected["tie_embeddings"],
        ),
    }
    for flag, (given, needed) in wrong.items():
        if given != needed:
            advice = "must be given" if needed else "must not be given"
            yield f"{flag} {advice} for the model in {args.hf_checkpoint}."


_HF_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "vocab_size": "vocab_size",
}
"""Shape flag -> field of config.json."""


def _from_hf(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(f"config.json: rope type {kind!r} is not supported yet; known: default, llama3.")
    heads = config["num_attention_heads"]
    family = FAMILY_OF_MODEL_TYPE[config["model_type"]]
    return {
        "family": family,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "rotary_base": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "vocab_size": config["vocab_size"],
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qk_layernorm": family == "qwen3",
        "add_qkv_bias": family == "qwen2" or bool(config.get("attention_bias", False)),
        "max_position_embeddings": config.get("max_position_embeddings", 4096),
        "rope_scaling": rope if kind == "llama3" else None,
    }
