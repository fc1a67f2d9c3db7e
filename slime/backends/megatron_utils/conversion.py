"""Functions for users' conversion scripts and plugins: build a model, and convert its weights from and to Hugging Face.

    init                            process groups and seeds of a script that torchrun started
    get_model_provider_func         makes the parts of the model for this rank
    load_hf_weights                 fills them from safetensors files
    save_hf_model_direct_to_path    writes such files
    convert_to_hf, remove_padding   one whole tensor

The trainer uses ``setup`` and ``checkpoint.hf_weights``. These are the same steps with ``args`` alone. Their public
names are in ``slime.compat``: ``initialize``, ``model_provider``, ``hf_to_megatron``, ``hf_checkpoint_saver``,
``megatron_to_hf`` and ``misc_utils``. ``args`` has Megatron's flags. The model is that of ``args.hf_checkpoint``.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.model_rules import padded_vocab_size, sees_media
from slime.backends.megatron_utils.patches.install import install
from slime.backends.training.arguments import ParallelArgs, TrainerArgs
from slime.backends.training.hf_files import save_hf_directory
from slime.config.groups import RunConfig, from_args
from slime.models.family import Rule, local_name
from slime.models.hf_shape import read_shape
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError

__all__ = [
    "convert_to_hf",
    "get_model_provider_func",
    "init",
    "load_hf_weights",
    "remove_padding",
    "save_hf_model_direct_to_path",
    "strip_param_name_prefix",
]

_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


def init(args: Namespace) -> None:
    """Initialize process groups and seeds from the environment variables of torchrun."""
    install()  # before any import of megatron, which is why such imports are inside functions
    from slime.backends.megatron_utils.process_groups import init_distributed

    init_distributed(from_args(ParallelArgs, args), from_args(TrainerArgs, args))


def get_model_provider_func(args: Namespace, role: str = "actor") -> Callable[..., torch.nn.Module]:
    """A function that makes this rank's part of the model, without weights. Call it after :func:`init`.

    Its parameters are those that Megatron's ``get_model`` passes. ``pre_process`` and ``post_process`` are ignored:
    they follow from the rank.

    Args:
        role: ``actor``, or ``critic`` for a model with a value head.
    """
    if role not in ("actor", "critic"):
        raise ConfigError(f"role {role!r} must be actor or critic.")

    def provide(
        pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
    ) -> torch.nn.Module:
        from slime.backends.megatron_utils.model.build import build_model
        from slime.backends.megatron_utils.model.gpt import add_value_head
        from slime.backends.megatron_utils.transformer_config import build_config

        shape = _shape(args)
        if role == "critic":
            shape = replace(shape, is_tied=False)  # a value head replaces the output layer
        config = build_config(RunConfig.of(args), shape)
        padded = padded_vocab_size(args, shape)
        model = build_model(shape, config, padded_vocab_size=padded, vp_stage=vp_stage)
        if role == "critic":
            add_value_head([model], init_std=args.init_method_std, seed=args.seed)
        return model

    return provide


def load_hf_weights(args: Namespace, model: Any, path: str | Path) -> None:
    """Fill ``model``, or the chunks of a list, from the safetensors files in ``path``. A collective.

    Raises:
        ConfigError: files and model do not fit. Lists every tensor that is missing, unknown or misshapen.
    """
    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights

    load_weights(model, _shape(args), str(path), "path")


def save_hf_model_direct_to_path(
    args: Namespace,
    output_dir: str | Path,
    model: Any,
    *,
    model_name: str | None = None,
    quantization_config: dict[str, Any] | None = None,
    progress_desc: str = "Save HF checkpoint",
) -> None:
    """Write ``model`` as a Hugging Face checkpoint, with the configuration and tokenizer of ``args.hf_checkpoint``.

    A collective. Several ranks write.

    Args:
        model_name: ignored. The family is that of ``args.hf_checkpoint``.
        quantization_config: must be None.
        progress_desc: ignored.
    """
    _refuse_quantization(quantization_config)
    from slime.backends.megatron_utils.checkpoint.hf_weights import export_weights

    source = args.hf_checkpoint
    weights = export_weights(model, _shape(args), layout_of=source)
    save_hf_directory(weights, source, str(output_dir))


def convert_to_hf(
    args: Namespace,
    model_name: str,
    name: str,
    param: torch.Tensor,
    quantization_config: dict[str, Any] | None = None,
    transform_ue8m0: bool = True,
) -> list[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors inside one whole Megatron tensor, with their names.

    All experts of a layer may be one tensor, as in the model.

    Args:
        model_name: ignored. The family is that of ``args.hf_checkpoint``.
        name: of the tensor in a model of local or Transformer Engine's layers, with or without ``module.`` before it.
            Layers and experts count over the whole model.
        param: the whole tensor, not the part of a rank.
        quantization_config: must be None.
        transform_ue8m0: ignored, as it belongs to ``quantization_config``.

    Raises:
        ConfigError: the family has no tensor of that name.
    """
    _refuse_quantization(quantization_config)
    install()
    from slime.backends.megatron_utils.checkpoint.tensors import dimensions_of, from_megatron
    from slime.backends.megatron_utils.model.experts import experts_of
    from slime.backends.megatron_utils.transformer_config import build_config

    shape = _shape(args)
    size = dimensions_of(build_config(RunConfig.of(args), shape), shape.vocab_size)
    found: list[tuple[str, torch.Tensor]] = []
    num_experts = None if shape.moe is None else shape.moe.num_experts
    for single, tensor in experts_of(local_name(strip_param_name_prefix(name)), param, num_experts):
        rule, numbers = _rule(shape, single)
        parts = from_megatron(tensor, rule, size)
        found += [(hf.format(**numbers), part) for hf, part in zip(rule.hf, parts, strict=True)]
    return found


def _rule(shape: ModelShape, name: str) -> tuple[Rule, dict[str, int]]:
    for rule in shape.family.rules:
        if found := _pattern(rule).fullmatch(name):
            numbers = {key: int(value) for key, value in found.groupdict().items()}
            if "mtp" in numbers:
                numbers["mtp_layer"] = shape.num_layers + numbers["mtp"]
            return rule, numbers
    raise ConfigError(f"{name}: models of model_type {shape.model_type} have no such tensor.")


def convert_tensor_to_hf(args: Namespace, name: str, param: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """:func:`convert_to_hf` under the public names of the families. The family is that of ``args.hf_checkpoint``."""
    return convert_to_hf(args, "", name, param)


def _shape(args: Namespace) -> ModelShape:
    return read_shape(args.hf_checkpoint, with_vision=sees_media(args))


def _pattern(rule: Rule) -> re.Pattern[str]:
    # re.escape has put a backslash before each brace.
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(rule.megatron)))


def remove_padding(name: str, param: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """``param`` without padding rows of the vocabulary, if it is the embedding or the head."""
    return param[:vocab_size] if strip_param_name_prefix(name) in _PADDED else param


def strip_param_name_prefix(name: str) -> str:
    """A parameter's name without the ``module.`` prefixes of the wrappers around the model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _refuse_quantization(config: dict[str, Any] | None) -> None:
    if config is not None:
        raise ConfigError(
            "quantization_config must be None: weights are quantized on their way to the engines (slime.weight_sync), "
            "checkpoints by tools/convert_hf_to_fp8.py and tools/convert_hf_to_int4_direct.py."
        )
