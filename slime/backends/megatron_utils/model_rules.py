"""Rules of the model: attention, images, and a user's own layers (``--spec MODULE FUNCTION``).

Imports torch and megatron only to load a user's function, whose module imports them.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.config.plan.layout import PlanError, stage_layers
from slime.hooks.load import can_be_called, load_function
from slime.models.family import is_family_spec, is_vision_spec
from slime.models.hf_shape import read_shape
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError


def joint_norm(args: Namespace, shape: ModelShape) -> Iterator[str]:
    """Ranks share a norm over all key heads like the heads, which they must not split."""
    ranks = args.tensor_model_parallel_size
    if shape.family.has_joint_qk_norm and ranks > shape.num_query_groups:
        yield (
            f"--tensor-model-parallel-size {ranks} must not exceed the {shape.num_query_groups} key heads of "
            f"--hf-checkpoint {args.hf_checkpoint}: its norm is over all of them together."
        )


def sparse(args: Namespace, shape: ModelShape) -> Iterator[str]:
    """The indexer of sparse attention."""
    where = f"--hf-checkpoint {args.hf_checkpoint}"
    if shape.sparse is None:
        if args.allgather_cp and args.context_parallel_size > 1:
            yield f"--allgather-cp is for sparse attention, which the model of {where} does not have. Drop the flag."
        return
    if args.mtp_num_layers:
        yield (
            f"--mtp-num-layers {args.mtp_num_layers} is not supported yet for {where}: prediction layers with sparse "
            "attention are not built. Drop the flag."
        )
    try:
        stages = stage_layers(args, shape.num_layers, args.pipeline_model_parallel_size)
    except PlanError:
        return  # the rule about stages reports it
    for stage in stages:
        if stage and stage.start < shape.num_layers and not shape.sparse.layers[stage.start]:
            firsts = ", ".join(str(layer) for layer, has_indexer in enumerate(shape.sparse.layers) if has_indexer)
            yield (
                f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} begins a stage with layer "
                f"{stage.start} (counted from 0), which shares the indexer of a layer before it. Stages may begin with "
                f"layers {firsts}: set --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers."
            )
            return


def sees_media(args: Namespace) -> bool:
    """Whether the vision tower is built: prompts have images, or --spec of a launch script names it."""
    spec = getattr(args, "spec", None)  # programs for one checkpoint have neither flag
    return bool(getattr(args, "multimodal_keys", None)) or bool(spec and is_vision_spec(spec[0]))


def vision(args: Namespace) -> Iterator[str]:
    """Training on images."""
    if args.hf_checkpoint is None or not sees_media(args):
        return
    keys = getattr(args, "multimodal_keys", None)
    flag = "--multimodal-keys" if keys else f"--spec {' '.join(args.spec)}"
    try:
        read_shape(args.hf_checkpoint)
    except ConfigError:
        return  # another rule reports it
    try:
        shape = read_shape(args.hf_checkpoint, with_vision=True)
    except ConfigError as error:
        yield from error.problems
        return
    if "audio" in (keys or {}):
        yield "--multimodal-keys names audio, which is not supported yet in training: use image and video."
    if args.custom_model_provider_path is not None:
        yield f"{flag} is not supported yet with --custom-model-provider-path: drop one of them."
    if args.mtp_num_layers:
        yield (
            f"--mtp-num-layers {args.mtp_num_layers} is not supported yet with {flag}: prediction layers do not see "
            "images. Drop the flag."
        )
    try:
        first = stage_layers(args, shape.num_layers, args.pipeline_model_parallel_size)[0]
    except PlanError:
        return  # the rule about stages reports it
    chunks = args.virtual_pipeline_model_parallel_size or 1
    deep = 0 if shape.vision is None else shape.vision.num_deep_layers
    if len(first) // chunks < deep:
        yield (
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} leaves {len(first) // chunks} layers "
            f"to the first part of the model; it must have the {deep} layers that images are added to. Use fewer "
            "stages, or set --decoder-first-pipeline-num-layers."
        )


def user_spec(args: Namespace) -> Any | None:
    """The object that a user's ``--spec`` names: a function of (args, config, vp_stage), or layers.

    None without such a flag, or if a model family builds the layers anyway.

    Raises:
        ConfigError: it cannot be loaded, or the function takes other arguments.
    """
    words = getattr(args, "spec", None)
    if not words or is_family_spec(words[0]) or is_vision_spec(words[0]):
        return None
    flag = f"--spec {' '.join(words)}"
    if len(words) > 2:
        raise ConfigError(f"{flag}: give a module and a function, or one word such as file.py:function.")
    # The user's module imports megatron.core, which is importable on a CPU only after install().
    from slime.backends.megatron_utils.patches.install import install

    install()
    try:
        found = load_function(":".join(words))
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if callable(found) and not can_be_called(found, ("args", "config", "vp_stage")):
        raise ConfigError(
            f"{flag} is called with (args, config, vp_stage), but its signature is {inspect.signature(found)} "
            "(see docs/en/get_started/customization.md)."
        )
    return found


def spec(args: Namespace) -> Iterator[str]:
    """The user's function can be loaded and called."""
    try:
        user_spec(args)
    except ConfigError as error:
        yield from error.problems
