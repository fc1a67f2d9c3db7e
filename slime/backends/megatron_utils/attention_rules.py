"""Rules of attention that families have in their own way. Called by ``argument_rules``; imports no torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slime.config.plan.layout import PlanError, stage_layers
from slime.models.shape import ModelShape

__all__ = ["joint_norm", "sparse"]


def joint_norm(args: Namespace, shape: ModelShape) -> Iterator[str]:
    """A norm over all key heads is cut like the heads, which must not be in pieces themselves."""
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
        return  # the rule about stages says so
    for stage in stages:
        if stage and stage.start < shape.num_layers and not shape.sparse.layers[stage.start]:
            firsts = ", ".join(str(layer) for layer, has_indexer in enumerate(shape.sparse.layers) if has_indexer)
            yield (
                f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} begins a stage with layer "
                f"{stage.start} (counted from 0), which shares the indexer of a layer before it. Stages may begin with "
                f"layers {firsts}: set --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers."
            )
            return
