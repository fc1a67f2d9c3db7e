"""Values derived from the Megatron flags (``STEPS``) and rules about them (``RULES``).

``slime.ray.arguments`` runs them for the command line, ``conversion`` for the tools. Therefore they may only read
Megatron's flags, ``hf_checkpoint``, ``debug_rollout_only``, ``world_size`` and, if it is there, ``multimodal_keys``. A
step derives values and adds notices. A rule returns one sentence per problem. Imports neither torch nor megatron.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator

from slime.backends.megatron_utils.model_rules import (
    check_against_hf,
    joint_norm,
    resolve_model,
    shape_or_none,
    sparse,
    spec,
    vision,
)
from slime.backends.megatron_utils.optimizer_rules import (
    deepgemm,
    fake_quantization,
    fp8,
    has_te_attention,
    instances,
    optimizer,
    overlap,
    schedule,
    transformer_engine,
    uses_transformer_engine,
    weight_decay,
)
from slime.backends.training.arguments import OptimizerArgs, ParallelArgs
from slime.config import groups
from slime.config.groups import flag_of, from_args
from slime.models.family import is_family_spec
from slime.models.shape import ModelShape

_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("microbatch_group_size_per_vp_stage", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("recompute_num_layers", "lr_decay_iters", "lr_wsd_decay_iters", "keep_last_checkpoints", "seq_length"),
    *("num_distributed_optimizer_instances", "ddp_bucket_size", "muon_num_ns_steps"),
)


# ---- steps


def _parallel(args: Namespace) -> None:
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
        groups.info(args, "--sequence-parallel", "off, because --tensor-model-parallel-size is 1.")
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = max(1, args.tensor_model_parallel_size)
    args.virtual_pipeline_model_parallel_size = virtual_stages(args)
    if args.virtual_pipeline_model_parallel_size is not None and args.microbatch_group_size_per_vp_stage is None:
        args.microbatch_group_size_per_vp_stage = args.pipeline_model_parallel_size  # Megatron's default
    shared = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    # Rules come after steps: sizes may still be 0.
    args.data_parallel_size = max(1, args.world_size // max(1, shared))
    args.variable_seq_lengths = True  # packed micro-batches differ in length


def virtual_stages(args: Namespace) -> int | None:
    """Chunks of the model on every pipeline rank: None for one, or if the flags do not fit (a rule reports it)."""
    stages = args.num_virtual_stages_per_pipeline_rank
    per_chunk, ranks = args.num_layers_per_virtual_pipeline_stage, args.pipeline_model_parallel_size
    if stages is None and per_chunk is not None and args.num_layers is not None and per_chunk > 0 and ranks > 0:
        stages = _counted_layers(args, args.num_layers) // ranks // per_chunk
    return stages if stages is not None and stages > 1 else None


def _precision(args: Namespace) -> None:
    if not args.fp16 and not args.fp32:
        args.bf16 = True
    if args.use_distributed_optimizer is None:
        args.use_distributed_optimizer = from_args(OptimizerArgs, args).is_distributed
    if args.bf16:
        args.accumulate_allreduce_grads_in_fp32 = True
    if args.recompute_activations and args.recompute_granularity is None:
        args.recompute_granularity = "selective"


def _layers(args: Namespace) -> None:
    if uses_transformer_engine(args):
        has_attention = has_te_attention(args, is_latent=bool(args.multi_latent_attention))
        attention = "attention" if has_attention else "with the attention of local layers"
        text = f"layers of Transformer Engine: linear layers joined with norms, grouped experts, {attention}."
        groups.info(args, "--transformer-impl" if args.fp8 is None else "--fp8-format", text)


def _experts(args: Namespace) -> None:
    given = args.moe_router_bias_update_rate
    if given is None:
        args.moe_router_bias_update_rate = 0.0
        if args.moe_router_enable_expert_bias:
            groups.info(
                args, "--moe-router-bias-update-rate", "0, the biases stay as they are (Megatron's default is 0.001)."
            )
    is_flex, has_te = args.moe_token_dispatcher_type == "flex", uses_transformer_engine(args)
    if is_flex and has_te:
        return
    if args.moe_enable_deepep or args.moe_token_dispatcher_type != "alltoall":
        flag = "--moe-enable-deepep" if args.moe_enable_deepep else "--moe-token-dispatcher-type"
        missing = "--moe-token-dispatcher-type flex" if has_te else "--transformer-impl transformer_engine"
        text = f"no effect without {missing}: tokens reach the experts by all-to-all over NCCL. Expect slower experts"
        groups.warn(args, flag, f"{text} if their ranks are on several nodes.")
    args.moe_token_dispatcher_type = "alltoall"


def _tokenizer_and_spec(args: Namespace) -> None:
    args.tokenizer_type = args.tokenizer_type or "HuggingFaceTokenizer"
    args.tokenizer_model = args.hf_checkpoint if args.tokenizer_model is None else os.path.abspath(args.tokenizer_model)
    if args.spec and is_family_spec(args.spec[0]):
        groups.info(args, "--spec", f"{' '.join(args.spec)} is not needed: the family builds these layers.")


# ---- rules


def _sizes(args: Namespace) -> Iterator[str]:
    for name in _SIZES:
        value = vars(args)[name]
        if value is not None and value < 1:
            yield f"{_spelling(name)} {value} must be at least 1."


def _spelling(name: str) -> str:
    if name == "microbatch_group_size_per_vp_stage":
        return "--microbatch-group-size-per-virtual-pipeline-stage"
    return flag_of(name)


def _tensor(args: Namespace) -> Iterator[str]:
    ranks = args.tensor_model_parallel_size
    shape = shape_or_none(args)
    if ranks <= 1 or shape is None:
        return
    where = f"the model of --hf-checkpoint {args.hf_checkpoint}"
    for value, what in (
        (shape.num_attention_heads, "attention heads"),
        (shape.ffn_hidden_size, "columns of the MLP"),
        # Without sequence parallelism every rank has all these columns.
        (shape.hidden_size if args.sequence_parallel else ranks, "columns of the residual stream"),
    ):
        if value % ranks:
            yield f"--tensor-model-parallel-size {ranks} must divide the {value} {what} of {where}."
    groups = shape.num_query_groups
    if groups % ranks and ranks % groups:
        yield f"--tensor-model-parallel-size {ranks} must divide the {groups} key heads of {where}, or be a multiple."
    if shape.mla is not None and not args.sequence_parallel:
        yield f"--tensor-model-parallel-size {ranks} with latent attention needs --sequence-parallel."
    if shape.moe is not None and not args.sequence_parallel:
        yield f"--tensor-model-parallel-size {ranks} with experts needs --sequence-parallel."


def _attention(args: Namespace) -> Iterator[str]:
    shape = shape_or_none(args)
    if shape is not None:
        yield from joint_norm(args, shape)
        yield from sparse(args, shape)


def _delta_nets(args: Namespace) -> Iterator[str]:
    """Tensor- and context-parallel ranks share the key heads."""
    shape, tensor, context = shape_or_none(args), args.tensor_model_parallel_size, args.context_parallel_size
    if shape is None or shape.delta_net is None or min(tensor, context) < 1:
        return
    groups, heads = shape.num_query_groups, shape.delta_net.num_key_heads
    if tensor > groups:  # Megatron then cuts the queries of a group, but not their gates
        yield (
            f"--tensor-model-parallel-size {tensor} must not exceed the {groups} key heads of --hf-checkpoint "
            f"{args.hf_checkpoint}, whose attention has an output gate."
        )
    if heads % (tensor * context):
        yield (
            f"--tensor-model-parallel-size {tensor} x --context-parallel-size {context} must divide the {heads} key "
            f"heads of the gated delta nets of --hf-checkpoint {args.hf_checkpoint}."
        )


def _expert_ranks(args: Namespace) -> Iterator[str]:
    expert, pipeline = args.expert_model_parallel_size, args.pipeline_model_parallel_size
    tensor = from_args(ParallelArgs, args).tensor_ranks_of_experts
    shape = shape_or_none(args)
    if min(expert, pipeline, tensor) < 1:
        return  # reported with the other sizes
    if expert > 1 and shape is not None:
        if shape.moe is None:
            yield (
                f"--expert-model-parallel-size {expert}: the model of --hf-checkpoint {args.hf_checkpoint} "
                f"(model_type {shape.model_type}) has no experts; use 1."
            )
        elif shape.moe.num_experts % expert:
            yield (
                f"--expert-model-parallel-size {expert} must divide the {shape.moe.num_experts} experts of "
                f"--hf-checkpoint {args.hf_checkpoint}."
            )
    if shape is not None and shape.moe is not None and shape.moe.ffn_hidden_size % tensor:
        columns = shape.moe.ffn_hidden_size
        yield f"--expert-tensor-parallel-size {tensor} must divide the {columns} columns of an expert."
    if tensor != args.tensor_model_parallel_size and expert == 1 and shape is not None and shape.moe is not None:
        yield (
            f"--expert-tensor-parallel-size {tensor} differs from --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size}: that needs --expert-model-parallel-size above 1."
        )
    ranks = tensor * expert * pipeline
    if shape is not None and shape.moe is not None and args.world_size % max(1, ranks):
        yield (
            f"{args.world_size} trainer ranks must be a multiple of --expert-tensor-parallel-size {tensor} x "
            f"--expert-model-parallel-size {expert} x --pipeline-model-parallel-size {pipeline} = {ranks}."
        )


def _stages(args: Namespace) -> Iterator[str]:
    ranks = args.pipeline_model_parallel_size
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if ranks == 1:
        for flag, value in (
            ("--decoder-first-pipeline-num-layers", first),
            ("--decoder-last-pipeline-num-layers", last),
        ):
            if value is not None:
                yield f"{flag} {value} needs --pipeline-model-parallel-size above 1."
        return
    shape = shape_or_none(args)
    if ranks < 1 or shape is None:
        return
    if ranks > shape.num_layers:
        yield f"--pipeline-model-parallel-size {ranks} exceeds the {shape.num_layers} layers of the model."
        return
    yield from _uneven_stages(args, shape, ranks)


def _uneven_stages(args: Namespace, shape: ModelShape, ranks: int) -> Iterator[str]:
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    layers = _counted_layers(args, shape.num_layers)
    if first is None and last is None:
        if layers % ranks:
            yield (
                f"--pipeline-model-parallel-size {ranks} does not divide the {layers} layers of the model: give "
                "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers."
            )
        return
    between = ranks - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if (between and (rest < between or rest % between)) or (not between and rest):
        yield (
            f"--decoder-first-pipeline-num-layers {first} and --decoder-last-pipeline-num-layers {last} leave {rest} "
            f"of {layers} layers for {between} other stages (--pipeline-model-parallel-size {ranks}): they must share "
            "them evenly."
        )


def _interleaving(args: Namespace) -> Iterator[str]:
    per_chunk, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if per_chunk is None and stages is None:
        return
    flag = f"--num-virtual-stages-per-pipeline-rank {stages}"
    if stages is None:
        flag = f"--num-layers-per-virtual-pipeline-stage {per_chunk}"
    elif per_chunk is not None:
        yield f"{flag} and --num-layers-per-virtual-pipeline-stage {per_chunk} say the same twice: drop one."
    ranks, shape = args.pipeline_model_parallel_size, shape_or_none(args)
    if ranks < 2:
        yield f"{flag} needs --pipeline-model-parallel-size above 1."
        return
    if shape is None:
        return
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if stages is None and (first is not None or last is not None):
        yield f"{flag} needs stages of equal size: use --num-virtual-stages-per-pipeline-rank with uneven ones."
        return
    layers = _counted_layers(args, shape.num_layers)
    inner = ranks - (first is not None) - (last is not None)
    sizes = {size for size in (first, last) if size is not None}
    if inner:
        sizes.add((layers - (first or 0) - (last or 0)) // inner)
    pieces = per_chunk if stages is None else stages
    for size in sorted(sizes):
        if pieces and pieces > 0 and size % pieces:
            what = f"into {pieces} chunks" if stages is not None else f"into chunks of {pieces} layers"
            yield f"{flag}: a stage of {size} layers cannot be cut {what}."


def _lengths(args: Namespace) -> Iterator[str]:
    ranks, length = args.context_parallel_size, args.seq_length
    if ranks > 1 and length is not None and length % (2 * ranks):
        yield f"--seq-length {length} must be a multiple of 2 x --context-parallel-size {ranks}."


def _recompute(args: Namespace) -> Iterator[str]:
    granularity = args.recompute_granularity
    if args.recompute_activations and granularity == "full":
        yield "--recompute-activations means --recompute-granularity selective, but full is given: drop one."
    if granularity == "full":
        if args.recompute_num_layers is None:
            yield "--recompute-method block needs --recompute-num-layers N: the first N layers are recomputed."
        return
    for name in ("recompute_method", "recompute_num_layers"):
        if vars(args)[name] is not None:
            yield f"{flag_of(name)} {vars(args)[name]} needs --recompute-granularity full."
    if args.recompute_modules and granularity is None:
        yield "--recompute-modules needs --recompute-granularity selective."


def _rampup(args: Namespace) -> Iterator[str]:
    if args.rampup_batch_size:
        shown = " ".join(args.rampup_batch_size)
        yield (
            f"--rampup-batch-size {shown} has no meaning here: every rollout is trained on in whole steps of "
            "--global-batch-size samples. Leave it out; to change the batch, resume with other batch flags."
        )


def _split_queries(args: Namespace) -> Iterator[str]:
    """Muon takes the heads of a rank apart into queries, keys and values."""
    ranks, shape = args.tensor_model_parallel_size, shape_or_none(args)
    if "muon" not in args.optimizer or not args.muon_split_qkv or shape is None or shape.mla is not None:
        return
    if ranks > shape.num_query_groups:
        yield (
            f"--optimizer {args.optimizer}: {ranks} tensor-parallel ranks cut the {shape.num_query_groups} key heads "
            "of the model in pieces, which cannot be orthogonalized: add --no-muon-split-qkv or use fewer ranks."
        )
    if shape.family.has_output_gate:
        yield (
            f"--optimizer {args.optimizer}: in --hf-checkpoint {args.hf_checkpoint} queries stand beside output gates "
            "and cannot be taken apart from them: add --no-muon-split-qkv."
        )


def _balancing(args: Namespace) -> Iterator[str]:
    coefficients = args.moe_aux_loss_coeff or []
    kinds = args.moe_router_load_balancing_type or []
    if any(coefficients):
        shown = " ".join(f"{value:g}" for value in coefficients)
        yield (
            f"--moe-aux-loss-coeff {shown} is not supported yet: the balancing loss has not been verified on packed "
            "sequences. Use 0."
        )
    if "sinkhorn" in kinds:
        yield "--moe-router-load-balancing-type sinkhorn is not supported yet: it replaces the router. Leave it out."
    if len(kinds) > 1 and coefficients and len(coefficients) != len(kinds):
        yield (
            f"--moe-aux-loss-coeff has {len(coefficients)} values, --moe-router-load-balancing-type {len(kinds)}: give "
            "one each."
        )


def _upcycling(args: Namespace) -> Iterator[str]:
    if args.moe_use_upcycling:
        yield (
            "--moe-use-upcycling makes experts while a trainer starts, and engines would still load the dense model: "
            "run tools/upcycle_hf.py once, give its result as --hf-checkpoint and leave the flag out."
        )


def _tokenizer(args: Namespace) -> Iterator[str]:
    if args.tokenizer_type not in (None, "HuggingFaceTokenizer"):
        yield f"--tokenizer-type {args.tokenizer_type} is not supported yet: use HuggingFaceTokenizer or leave it out."
    if args.tokenizer_model is not None and args.tokenizer_model != args.hf_checkpoint:
        yield (
            f"--tokenizer-model {args.tokenizer_model} is not supported yet: the tokenizer comes from --hf-checkpoint "
            f"{args.hf_checkpoint}. Leave it out."
        )


def _trained_parts(args: Namespace) -> Iterator[str]:
    if args.enable_mtp_training and not args.mtp_num_layers:
        yield "--enable-mtp-training needs --mtp-num-layers N: without it there are no prediction layers to train."
    if args.only_train_params_name_list and args.freeze_params_name_list:
        yield "--only-train-params-name-list and --freeze-params-name-list exclude each other: give one."


def _counted_layers(args: Namespace, num_layers: int) -> int:
    """Layers that the stages share, with the embedding and the loss where they count as one."""
    extra = int(args.account_for_embedding_in_pipeline_split) + int(args.account_for_loss_in_pipeline_split)
    return num_layers + extra


def _for_trainer(rule: Callable[[Namespace], Iterable[str]]) -> Callable[[Namespace], Iterable[str]]:
    def checked(args: Namespace) -> Iterable[str]:
        return () if args.debug_rollout_only else rule(args)  # generation alone starts no trainer

    checked.__name__ = rule.__name__
    return checked


STEPS: tuple[Callable[[Namespace], None], ...] = (
    resolve_model,
    _precision,
    fake_quantization,
    _parallel,
    _layers,
    _experts,
    _tokenizer_and_spec,
)
"""Resolve steps in order; the general ones ran before."""

TRAINING_RULES: tuple[Callable[[Namespace], Iterable[str]], ...] = tuple(
    _for_trainer(rule)
    for rule in (_sizes, _lengths, _rampup, optimizer, schedule, weight_decay, _balancing, _tokenizer)
)
"""Those that hold for every backend with these flags."""

RULES: tuple[Callable[[Namespace], Iterable[str]], ...] = (
    *(
        _for_trainer(rule)
        for rule in (
            check_against_hf,
            _tensor,
            _attention,
            _delta_nets,
            _expert_ranks,
            _stages,
            _interleaving,
            _recompute,
            fp8,
            transformer_engine,
            deepgemm,
            instances,
            overlap,
            _upcycling,
            _split_queries,
            spec,
            _trained_parts,
            vision,
        )
    ),
    *TRAINING_RULES,
)
"""One problem is one sentence: flag, value, rule, fix."""
