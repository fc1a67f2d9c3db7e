"""Rules of the model: flags against config.json, attention, images, and a user's own layers (``--spec``).

Missing model flags are derived from config.json (:func:`resolve_model`), contradicting ones are problems
(:func:`check_against_hf`). Imports torch and megatron only to load a user's function, whose module imports them.
"""

from __future__ import annotations

import inspect
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.config.plan.placement import PlanError, stage_layers
from slime.hooks import can_be_called, load_function
from slime.models.family import is_family_spec, is_vision_spec
from slime.models.hf_shape import read_shape
from slime.models.shape import SHAPE_FLAGS, SWITCHES, ModelShape, expand_layer_pattern
from slime.utils.errors import ConfigError

_SEQ_LENGTH = 4096


def resolve_model(args: Namespace) -> None:
    """Derive every model argument that is not given from ``--hf-checkpoint``, and expand --moe-layer-freq.

    Given ones are not changed: :func:`check_against_hf` compares them. Does nothing if the config cannot be read or the
    model cannot be trained: the check reports it, and generation alone needs none of this.
    """
    shape = shape_or_none(args)
    if shape is None:
        return
    derived: dict[str, Any] = {row.dest: row.value(shape) for row in SHAPE_FLAGS}
    derived |= {row.dest: row.has(shape) for row in SWITCHES}
    derived |= {
        "swiglu": True,
        "add_bias_linear": False,
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "group_query_attention": shape.mla is None and shape.num_query_groups < shape.num_attention_heads,
        # 8 is Megatron's default.
        "rope_scaling_factor": 8.0 if shape.llama3_rope is None else shape.llama3_rope.factor,
        "rotary_scaling_factor": 1.0 if shape.yarn_rope is None else shape.yarn_rope.factor,
        "mscale": 1.0 if shape.yarn_rope is None else shape.yarn_rope.mscale,
        "mscale_all_dim": 0.0 if shape.yarn_rope is None else shape.yarn_rope.mscale_all_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "seq_length": _SEQ_LENGTH,
    }
    derived |= _derived_routing(shape)
    for dest, value in derived.items():
        if dest not in args.given:
            setattr(args, dest, value)
    if args.moe_layer_freq is not None:  # text, or a list of text from a YAML file
        pattern = args.moe_layer_freq
        text = f"[{','.join(map(str, pattern))}]" if isinstance(pattern, list) else pattern
        layers = expand_layer_pattern(text, shape.num_layers)
        args.moe_layer_freq = pattern if layers is None else layers
    args.padded_vocab_size = padded_vocab_size(args, shape)


def padded_vocab_size(args: Namespace, shape: ModelShape) -> int:
    """Rows of the embedding: --padded-vocab-size, or a number that the tensor-parallel ranks divide."""
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    return shape.padded_vocab_size(max(1, args.make_vocab_size_divisible_by * args.tensor_model_parallel_size))


def check_against_hf(args: Namespace) -> list[str]:
    """One problem for each model flag that contradicts ``--hf-checkpoint``: both names and both values."""
    if args.hf_checkpoint is None or not (Path(args.hf_checkpoint) / "config.json").is_file():
        return []  # reported with the other missing files
    if args.debug_rollout_only:
        return []  # any model can generate
    try:
        shape = read_shape(args.hf_checkpoint)
    except ConfigError as error:
        return error.problems
    where = f"config.json of --hf-checkpoint {args.hf_checkpoint}"
    return [
        *_different_values(args, shape, where),
        *_different_switches(args, shape, where),
        *_different_routing(args, shape, where),
        *_too_many_mtp_layers(args, shape, where),
        *_bad_vocab_padding(args, shape),
    ]


def shape_or_none(args: Namespace) -> ModelShape | None:
    """The shape of the run's model. None if the config cannot be read, which a rule reports."""
    if args.hf_checkpoint is None:
        return None
    try:
        return read_shape(args.hf_checkpoint)
    except ConfigError:
        return None


def _derived_routing(shape: ModelShape) -> dict[str, Any]:
    """Flags with several spellings of one value: :func:`_different_routing` compares them."""
    moe = shape.moe
    return {
        "moe_layer_freq": None if moe is None else [int(has_experts) for has_experts in moe.layers],
        "moe_router_num_groups": None if moe is None else moe.num_groups,
        "moe_router_group_topk": None if moe is None else moe.group_topk,
        "moe_router_topk_scaling_factor": None if moe is None else moe.scaling_factor,
    }


def _is_same(given: Any, actual: Any) -> bool:
    if isinstance(given, int | float) and isinstance(actual, int | float):
        return math.isclose(given, actual, rel_tol=1e-6)  # two spellings of a number may differ in the last digits
    return bool(given == actual)


def _different_values(args: Namespace, shape: ModelShape, where: str) -> Iterator[str]:
    for row in SHAPE_FLAGS:
        given = vars(args)[row.dest]
        if row.dest not in args.given or given is None or not row.is_checked(shape):
            continue
        actual = row.value(shape)
        if actual is None:
            # q_lora_rank may be missing although the model has latent attention.
            has_part = shape.mla is not None if row.needs != "experts" else shape.moe is not None
            why = "is not used" if has_part else f"is for {row.needs}"
            yield f"{row.flag} {given} {why}, but model_type {shape.model_type} in {where} has none: drop the flag."
        elif not _is_same(given, actual):
            yield f"{row.flag} {given} differs from {row.hf} {actual} in {where}: drop the flag."


def _different_switches(args: Namespace, shape: ModelShape, where: str) -> Iterator[str]:
    for row in SWITCHES:
        if row.dest in args.given and vars(args)[row.dest] and not row.has(shape):
            yield (
                f"{row.flag} differs from model_type {shape.model_type} in {where}: {row.absence} there. Drop the flag."
            )


def _different_routing(args: Namespace, shape: ModelShape, where: str) -> Iterator[str]:
    moe = shape.moe
    if moe is None:
        for dest in _derived_routing(shape):
            # One group, or a factor of one, changes nothing.
            if dest in args.given and vars(args)[dest] not in (None, 1, "1"):
                yield f"--{dest.replace('_', '-')} is for experts, which model_type {shape.model_type} does not have."
        return
    if "moe_layer_freq" in args.given:
        layers = [int(has_experts) for has_experts in moe.layers]
        if args.moe_layer_freq != layers:
            yield _pattern_problem(args.moe_layer_freq, layers, where)
    for dest, hf, actual in (
        ("moe_router_num_groups", "n_group", moe.num_groups),
        ("moe_router_group_topk", "topk_group", moe.group_topk),
        ("moe_router_topk_scaling_factor", "routed_scaling_factor", moe.scaling_factor),
    ):
        given = vars(args)[dest]
        # one group, or a factor of one, is the same as none
        if dest in args.given and not _is_same(given or 1, actual or 1):
            flag = "--" + dest.replace("_", "-")
            yield f"{flag} {given} differs from {hf} {actual or 1} in {where}: drop the flag."


def _pattern_problem(given: Any, layers: Sequence[int], where: str) -> str:
    if not isinstance(given, list):
        return f"--moe-layer-freq {given} must be a whole number above 0 or a list of 0 and 1 such as [0]*3+[1]*58."
    if len(given) != len(layers):
        return f"--moe-layer-freq has {len(given)} entries, but the model of {where} has {len(layers)} layers."
    first = next(index for index, (a, b) in enumerate(zip(given, layers, strict=True)) if a != b)
    kind = "has experts" if layers[first] else "is dense"
    return f"--moe-layer-freq says {given[first]} for layer {first}, which {kind} in {where}: drop the flag."


def _too_many_mtp_layers(args: Namespace, shape: ModelShape, where: str) -> Iterator[str]:
    if args.mtp_num_layers is not None and not 1 <= args.mtp_num_layers <= shape.num_mtp_layers:
        has = f"has {shape.num_mtp_layers} such layers" if shape.num_mtp_layers else "has no such layers"
        yield f"--mtp-num-layers {args.mtp_num_layers}: {where} {has} (num_nextn_predict_layers)."


def _bad_vocab_padding(args: Namespace, shape: ModelShape) -> Iterator[str]:
    if args.make_vocab_size_divisible_by < 1:
        yield f"--make-vocab-size-divisible-by {args.make_vocab_size_divisible_by} must be at least 1."
    padded, ranks = args.padded_vocab_size, args.tensor_model_parallel_size
    if "padded_vocab_size" not in args.given or padded is None:
        return
    if padded < shape.vocab_size or padded % max(1, ranks):
        yield (
            f"--padded-vocab-size {padded} must be at least the {shape.vocab_size} tokens of --hf-checkpoint "
            f"{args.hf_checkpoint} and a multiple of --tensor-model-parallel-size {ranks}."
        )


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
    spec = vars(args).get("spec")  # programs for one checkpoint have neither flag
    return bool(vars(args).get("multimodal_keys")) or bool(spec and is_vision_spec(spec[0]))


def vision(args: Namespace) -> Iterator[str]:
    """Training on images."""
    if args.hf_checkpoint is None or not sees_media(args):
        return
    keys = vars(args).get("multimodal_keys")
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
    words = vars(args).get("spec")
    if not words or is_family_spec(words[0]) or is_vision_spec(words[0]):
        return None
    flag = f"--spec {' '.join(words)}"
    if len(words) > 2:
        raise ConfigError(f"{flag}: give a module and a function, or one word such as file.py:function.")
    # The user's module imports megatron.core, which is importable on a CPU only after install().
    from slime.backends.megatron_utils.patches import install

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
