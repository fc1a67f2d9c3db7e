"""Whether a run trains on images, and the rules of that. Called by ``argument_rules`` and ``actor``; no torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slime.config.plan.layout import PlanError, stage_layers
from slime.models.hf_shape import read_shape
from slime.utils.errors import ConfigError

__all__ = ["VISION_SPECS", "sees_media", "vision"]

VISION_SPECS = ("slime_plugins.models.qwen3_5_vl", "slime_plugins.models.qwen3_vl")
"""Modules of ``--spec`` that stand for a model with its vision tower."""


def sees_media(args: Namespace) -> bool:
    """Whether the vision tower is built: the prompts have images, or --spec of a launch script names it."""
    spec = getattr(args, "spec", None)  # programs for one checkpoint have neither flag
    return bool(getattr(args, "multimodal_keys", None)) or bool(spec and spec[0] in VISION_SPECS)


def vision(args: Namespace) -> Iterator[str]:
    """Training on images."""
    if args.hf_checkpoint is None or not sees_media(args):
        return
    flag = "--multimodal-keys" if getattr(args, "multimodal_keys", None) else f"--spec {' '.join(args.spec)}"
    try:
        read_shape(args.hf_checkpoint)
    except ConfigError:
        return  # another rule says so
    try:
        shape = read_shape(args.hf_checkpoint, with_vision=True)
    except ConfigError as error:
        yield from error.problems
        return
    if "audio" in (getattr(args, "multimodal_keys", None) or {}):
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
        return  # the rule about stages says so
    chunks = args.virtual_pipeline_model_parallel_size or 1
    deep = 0 if shape.vision is None else shape.vision.num_deep_layers
    if len(first) // chunks < deep:
        yield (
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} leaves {len(first) // chunks} layers "
            f"to the first part of the model; it must have the {deep} layers that images are added to. Use fewer "
            "stages, or set --decoder-first-pipeline-num-layers."
        )
