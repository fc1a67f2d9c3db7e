"""Rules over the resolved arguments. Every rule returns problems; the caller raises them all in one message.

A problem is one sentence: the flag, its value, the rule, the fix. Rules that need another room (hooks, model shape) are
passed in by the wiring.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from slime.config.groups import flag_of
from slime.utils.errors import ConfigError

__all__ = ["Rule", "check"]

Rule = Callable[[Namespace], Iterable[str]]


def check(args: Namespace, rules: Sequence[Rule] = ()) -> None:
    """Raise one :class:`ConfigError` with every problem of ``args``."""
    own: Sequence[Rule] = (_modes, _positive, _batches, _devices, _paths, _lengths, _algorithm, _parallel_sizes)
    problems = [problem for rule in (*own, *rules) for problem in rule(args)]
    if problems:
        raise ConfigError(problems)


def _modes(args: Namespace) -> Iterator[str]:
    if args.debug_rollout_only and args.debug_train_only:
        yield "--debug-rollout-only and --debug-train-only exclude each other: drop one."
    if sum((args.bf16, args.fp16, args.fp32)) > 1:
        yield "--bf16, --fp16 and --fp32 exclude each other: keep one (bf16 is the default)."


def _positive(args: Namespace) -> Iterator[str]:
    at_least_one = (
        "rollout_batch_size n_samples_per_prompt global_batch_size num_steps_per_rollout micro_batch_size "
        "save_interval eval_interval update_weights_interval actor_num_nodes actor_num_gpus_per_node "
        "rollout_num_gpus_per_engine num_gpus_per_node update_weight_buffer_size rollout_max_response_len "
        "n_samples_per_eval_prompt sglang_server_concurrency num_epoch"
    )
    for name in at_least_one.split():
        value = getattr(args, name)
        if value is not None and value < 1:
            yield f"{flag_of(name)} {value} must be at least 1."
    if args.num_rollout is not None and args.num_rollout < 0:
        yield f"--num-rollout {args.num_rollout} must not be negative."
    if args.rollout_temperature <= 0:
        yield f"--rollout-temperature {args.rollout_temperature} must be above 0: training needs sampled responses."


def _batches(args: Namespace) -> Iterator[str]:
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    product = f"--rollout-batch-size {args.rollout_batch_size} x "
    product += f"--n-samples-per-prompt {args.n_samples_per_prompt} = {samples}"
    if args.global_batch_size > samples:
        yield f"{product} samples per rollout do not fill one step of --global-batch-size {args.global_batch_size}."
    elif samples != args.global_batch_size * args.num_steps_per_rollout:
        yield (
            f"{product} must equal --global-batch-size {args.global_batch_size} x --num-steps-per-rollout "
            f"{args.num_steps_per_rollout} = {args.global_batch_size * args.num_steps_per_rollout}."
        )
    if not args.use_dynamic_batch_size and args.global_batch_size % (args.micro_batch_size * args.world_size):
        yield (
            f"--global-batch-size {args.global_batch_size} must be a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {args.world_size} data-parallel ranks, or use --use-dynamic-batch-size."
        )
    if args.use_dynamic_batch_size and (args.max_tokens_per_gpu or 0) < 1:
        yield f"--use-dynamic-batch-size needs --max-tokens-per-gpu N with N above 0, got {args.max_tokens_per_gpu}."
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        yield "--balance-by-flops forms dynamic micro-batches: it needs --use-dynamic-batch-size."
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} must be at least "
            f"--rollout-batch-size {args.rollout_batch_size}."
        )


def _devices(args: Namespace) -> Iterator[str]:
    if args.rollout_num_gpus is None:
        yield "--rollout-num-gpus is required: the number of devices for the inference engines."
    elif args.rollout_num_gpus % args.rollout_num_gpus_per_engine:
        yield (
            f"--rollout-num-gpus {args.rollout_num_gpus} must be a multiple of --rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine}."
        )
    elif args.rollout_num_gpus == 0 and not args.debug_train_only:
        yield "--rollout-num-gpus 0: training needs at least one engine, or --debug-train-only."
    if args.rollout_num_gpus_per_engine > args.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {args.rollout_num_gpus_per_engine} exceeds --num-gpus-per-node "
            f"{args.num_gpus_per_node}: engines over several nodes are not supported yet."
        )


def _paths(args: Namespace) -> Iterator[str]:
    if args.hf_checkpoint is None:
        yield "--hf-checkpoint is required: the Hugging Face directory of the model to train."
    elif not (Path(args.hf_checkpoint) / "config.json").is_file():
        yield f"--hf-checkpoint {args.hf_checkpoint}: there is no config.json in that directory."
    needs_prompts = args.rollout_global_dataset and args.load_debug_rollout_data is None
    if needs_prompts and args.prompt_data is None:
        yield "--prompt-data is required: the .jsonl or .parquet file with the prompts."
    if args.use_kl_loss and args.ref_load is not None and not Path(args.ref_load).is_dir():
        yield f"--ref-load {args.ref_load}: there is no such directory, and --use-kl-loss needs a reference model."
    if args.save is not None and args.save_interval is None and args.num_rollout != 0:
        yield "--save needs --save-interval N: how often to write a checkpoint (the last rollout is always saved)."


def _lengths(args: Namespace) -> Iterator[str]:
    context, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt > context - 1:
        yield f"--rollout-max-prompt-len {prompt} must be below --rollout-max-context-len {context}."
    if args.rollout_top_p != 1.0:
        yield f"--rollout-top-p {args.rollout_top_p} is not supported yet, nothing replays the nucleus: use 1."
    if args.rollout_top_k != -1:
        yield f"--rollout-top-k {args.rollout_top_k} is not supported yet: the trainer cannot replay the cut; use -1."


def _algorithm(args: Namespace) -> Iterator[str]:
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c {args.eps_clip_c} must be above 1 (dual clip)."
    grpo = args.loss_type == "policy_loss" and args.rewards_normalization and args.compute_advantages_and_returns
    if grpo and args.n_samples_per_prompt == 1 and not args.debug_rollout_only:
        yield (
            "--n-samples-per-prompt 1 makes every group-relative advantage zero, so nothing would be learned: "
            "use at least 2, or --disable-rewards-normalization."
        )


def _parallel_sizes(args: Namespace) -> Iterator[str]:
    for name in ("tensor", "pipeline", "context", "expert"):
        attribute = f"{name}_model_parallel_size" if name != "context" else "context_parallel_size"
        if getattr(args, attribute) > 1:
            yield f"{flag_of(attribute)} {getattr(args, attribute)} is not supported yet: use 1."
