"""Modes, devices, offloading, environment variables of launch scripts; batch sizes and the length of the run.

--rollout-batch-size x --n-samples-per-prompt = --global-batch-size x --num-steps-per-rollout
"""

from __future__ import annotations

import os
from argparse import Namespace

from slime.algorithms import find_estimator
from slime.config import groups
from slime.models.config_json import read_model_config, text_part
from slime.utils.errors import ConfigError


def modes(args: Namespace) -> None:
    """Derive the modes that replayed dumps and external engines imply."""
    if args.load_debug_rollout_data is not None and not args.debug_train_only:
        args.debug_train_only = True
        groups.info(args, "--debug-train-only", "on, because --load-debug-rollout-data replaces the engines")
    args.rollout_external = args.rollout_external_engine_addrs is not None


def critic(args: Namespace) -> None:
    """Whether a value function is trained. Its layout is that of the actor."""
    args.use_critic = find_estimator(args.advantage_estimator).needs_critic
    args.critic_num_nodes = args.actor_num_nodes
    args.critic_num_gpus_per_node = args.actor_num_gpus_per_node


def offloading(args: Namespace) -> None:
    """Decide the switches that are neither on nor off."""
    if args.offload:
        args.offload_train = args.offload_rollout = True
    if args.colocate and args.rollout_num_gpus == 0:
        groups.warn(args, "--colocate", "no effect: --rollout-num-gpus 0 starts no engine on the trainer's devices")
        args.colocate = args.offload_rollout = False
    if args.debug_rollout_only:  # no trainer to share devices with
        if args.colocate and args.rollout_num_gpus is None:
            args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
        args.colocate = args.offload_train = args.offload_rollout = False
    if args.colocate and args.release_train:
        if args.offload_train or args.offload_rollout is False:
            groups.warn(args, "--release-train", "it decides: trainers end instead of being offloaded, engines offload")
        # Trainer processes that end have nothing to offload.
        args.offload_train, args.offload_rollout = False, True
    elif args.colocate:
        args.offload_train = True if args.offload_train is None else args.offload_train
        args.offload_rollout = True if args.offload_rollout is None else args.offload_rollout
    # Actor and critic share the devices, so one of them must be away while the other works.
    if args.use_critic and not args.offload_train and not args.debug_rollout_only:
        if args.offload_train is False:
            groups.warn(args, "--no-offload-train", "actor and critic share devices: the trainer is offloaded")
        args.offload_train = True
    args.offload_train = bool(args.offload_train)
    args.offload_rollout = bool(args.offload_rollout)
    if args.offload_train:
        args.disable_grad_buffers_cpu_backup = args.disable_param_buffers_cpu_backup = True


def devices(args: Namespace) -> None:
    """Derive the number of slots of engines and trainer."""
    if args.colocate and args.rollout_num_gpus is None:
        args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
        groups.info(args, "--rollout-num-gpus", f"{args.rollout_num_gpus}: all devices of the trainer (--colocate)")
    if args.debug_rollout_only and args.rollout_num_gpus is None:
        args.rollout_num_gpus = args.rollout_num_gpus_per_engine
        groups.info(args, "--rollout-num-gpus", f"{args.rollout_num_gpus}: one engine (--debug-rollout-only)")
    if args.debug_train_only:
        args.rollout_num_gpus = 0
    elif args.rollout_num_gpus == 0 and not args.rollout_external:
        text = "the router only: engines are those that others register with it, such as behind --sglang-router-ip"
        groups.info(args, "--rollout-num-gpus 0", text)
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.rollout_num_gpus is None and not args.rollout_external:
        width = max(1, args.rollout_num_gpus_per_engine)
        args.rollout_num_gpus = -(-args.world_size // width) * width
        count = args.rollout_num_gpus
        text = f"not given: {count} device{'s' * (count != 1)}, as many as the trainer has"
        text += "" if args.rollout_num_gpus == args.world_size else f", rounded up to engines of {width}"
        groups.warn(args, "--rollout-num-gpus", text)
    args.rank = 0


def node_borders(args: Namespace) -> None:
    """Warn about engines on two nodes: slots are taken in node order, the trainer's first."""
    width, per_node = args.rollout_num_gpus_per_engine, args.num_gpus_per_node
    if not 1 < width <= per_node or not args.rollout_num_gpus or args.rollout_external:
        return
    if args.sglang_config is not None:  # a rule goes through its groups
        return
    first = 0 if args.colocate or args.debug_rollout_only else args.world_size
    # After width * per_node slots the borders repeat.
    starts = range(first, first + min(args.rollout_num_gpus, width * per_node), width)
    if any(start % per_node + width > per_node for start in starts):
        text = f"{width}: after the {first} devices of the trainer an engine would be on two nodes of "
        text += f"--num-gpus-per-node {per_node}, which does not work"
        groups.warn(args, "--rollout-num-gpus-per-engine", text)


# Variables of the environment that launch scripts set: one for the trainer's allocator, and those without meaning.

_SEGMENTS = "SLIME_ENABLE_EXPANDABLE_SEGMENTS"

# Begin of a name -> the reason why it has no effect. Variables that would make a run train something else are not
# listed here.
_UNREAD = {
    "SLIME_DESTROY_WORLD_PROCESS_GROUP": "process groups stay while a trainer has given its memory away",
    "SLIME_GRAD_COALESCE_CHUNK_BYTES": "gradients are reduced by Megatron's buckets: see --ddp-bucket-size",
    "SLIME_LAYERWISE_ALIGNMENT_": "outputs of layers are not written; slime doctor mismatch compares log-probs",
    "SLIME_DEEPGEMM_MOE_": "grouped products take all experts of a rank, backward is that of the usual layers",
    "MEGATRON_USE_SGLANG_": "the trainer has none of SGLang's kernels",
    "INDEXER_ROPE_NEOX_STYLE": "config.json says how the indexer's heads turn (indexer_rope_interleave)",
}


def allocator(args: Namespace) -> None:
    """Trainers' memory in segments that grow: less fragmentation if micro-batches differ in size.

    Raises:
        ConfigError: the variable is neither on nor off.
    """
    value = os.environ.get(_SEGMENTS, "0")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{_SEGMENTS}={value} in the environment: 1 is on, 0 is off.")
    if value == "1":
        # A value that the user gave replaces this one.
        args.train_env_vars = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | args.train_env_vars


def unread_variables(args: Namespace) -> None:
    """Warn about set variables that have no effect."""
    for name, value in sorted(os.environ.items()):
        why = next((why for beginning, why in _UNREAD.items() if name.startswith(beginning)), None)
        if why is not None and value not in ("", "0"):
            groups.warn(args, name, f"has no effect: {why}.")


_DEFAULT_ROLLOUT_BATCH = 32
_DEFAULT_GROUP = 8


def rollout_batch(args: Namespace) -> None:
    if args.rollout_batch_size is None:
        args.rollout_batch_size = _DEFAULT_ROLLOUT_BATCH
        groups.warn(args, "--rollout-batch-size", f"not given: {_DEFAULT_ROLLOUT_BATCH} prompts per rollout")
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size


def is_group_relative(args: Namespace) -> bool:
    """Whether the advantage of a sample is its reward relative to those of the other samples of its prompt."""
    is_centered = args.rewards_normalization and find_estimator(args.advantage_estimator).is_centered
    has_advantages = args.loss_type == "policy_loss" and args.compute_advantages_and_returns
    replaced = (
        *(args.use_opd, args.custom_advantage_function_path),
        *(args.custom_reward_post_process_path, args.custom_convert_samples_to_train_data_path),
    )
    return bool(is_centered and has_advantages and not any(replaced))


def has_other_terms(args: Namespace) -> bool:
    """Whether the gradient has a part that does not depend on rewards: KL divergence or entropy."""
    in_rewards = find_estimator(args.advantage_estimator).has_kl_in_rewards and args.kl_coef
    return any((in_rewards, args.use_kl_loss and args.kl_loss_coef, args.entropy_coef))


def group_size(args: Namespace) -> None:
    """A group-relative advantage of a single sample is zero, so a group that was not given has several."""
    if args.n_samples_per_prompt is not None:
        return
    if not is_group_relative(args):
        args.n_samples_per_prompt = 1
        return
    prompts, samples = args.rollout_batch_size, (args.global_batch_size or 0) * (args.num_steps_per_rollout or 1)
    if prompts > 0 and samples >= 2 * prompts and not samples % prompts:
        args.n_samples_per_prompt = samples // prompts
        steps = args.num_steps_per_rollout or "one step"
        text = f"{args.n_samples_per_prompt}: --global-batch-size {args.global_batch_size} x {steps} per rollout / "
        groups.info(args, "--n-samples-per-prompt", f"{text}--rollout-batch-size {prompts}")
        return
    args.n_samples_per_prompt = _DEFAULT_GROUP
    text = f"not given: {_DEFAULT_GROUP} responses per prompt, because {args.advantage_estimator} compares them"
    groups.warn(args, "--n-samples-per-prompt", text)


def global_batch(args: Namespace) -> None:
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.global_batch_size is None:  # one step per rollout, not Megatron's micro batch x data parallel
        steps = args.num_steps_per_rollout
        args.global_batch_size = max(1, samples // steps) if steps is not None and steps > 0 else samples
        if steps is None:
            text = f"{samples}: one optimizer step per rollout"
            groups.info(args, "--global-batch-size", text)
    if args.num_steps_per_rollout is None and args.global_batch_size > 0:
        args.num_steps_per_rollout = max(1, samples // args.global_batch_size)


def micro_batch_budget(args: Namespace) -> None:
    if args.use_dynamic_batch_size and args.log_probs_max_tokens_per_gpu is None:
        args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    if args.balance_by_flops:
        args.balance_data = True


def run_length(args: Namespace) -> None:
    if args.num_rollout is not None and args.num_epoch is not None:
        groups.warn(args, "--num-epoch", f"ignored, because --num-rollout {args.num_rollout} decides")
    elif args.num_rollout is None and args.num_epoch is None and args.rollout_global_dataset:
        args.num_epoch = 1
        groups.warn(args, "--num-rollout", "neither it nor --num-epoch is given: one epoch")


# Lengths of prompts and responses, evaluation, reward keys.

_DEFAULT_RESPONSE_LEN = 1024


def lengths(args: Namespace) -> None:
    """The context limit decides the limits of prompt and response that are not given."""
    engine_limit = vars(args).get("sglang_context_length")
    if args.rollout_max_context_len is None and isinstance(engine_limit, int) and engine_limit > 1:
        args.rollout_max_context_len = engine_limit
        groups.info(args, "--rollout-max-context-len", f"{engine_limit}: the limit of the engines")
    context = args.rollout_max_context_len
    if args.rollout_max_response_len is None:
        args.rollout_max_response_len = _response_len(args, context)
        if not args.debug_train_only:  # otherwise nothing is generated
            text = f"not given: {args.rollout_max_response_len} tokens"
            groups.warn(args, "--rollout-max-response-len", text)
    elif context is None and (model := _model_context(args.hf_checkpoint)) and args.rollout_max_response_len >= model:
        text = f"the model of --hf-checkpoint takes {model} tokens, prompt and response together"
        groups.warn(args, f"--rollout-max-response-len {args.rollout_max_response_len}", text)
    if context is not None and args.rollout_max_prompt_len is None:
        # Room for one token of the response.
        args.rollout_max_prompt_len = context - 1
    if args.eval_max_context_len is None:
        args.eval_max_context_len = context


def _response_len(args: Namespace, context: int | None) -> int:
    """The context without the longest prompt. Without a context limit 1024 tokens, or fewer for a small model."""
    prompt = args.rollout_max_prompt_len
    if context is not None:  # without a prompt limit generation leaves each prompt its own rest
        return max(1, context - (prompt or 1))
    model = _model_context(args.hf_checkpoint)
    if model is None:
        return _DEFAULT_RESPONSE_LEN
    # Without a limit prompts get half of the model's context.
    return max(1, min(_DEFAULT_RESPONSE_LEN, model - (prompt or model // 2)))


def _model_context(hf_checkpoint: str | None) -> int | None:
    """``max_position_embeddings`` of the model. None if it cannot be read, which the checks report."""
    value = text_part(read_model_config(hf_checkpoint)).get("max_position_embeddings")
    return value if isinstance(value, int) and value > 1 else None


def evaluation(args: Namespace) -> None:
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.eval_config is not None and args.eval_prompt_data:
        groups.warn(args, "--eval-prompt-data", "ignored, because --eval-config decides")
        args.eval_prompt_data = None
    has_sets = args.eval_config is not None or bool(args.eval_prompt_data)
    if args.eval_interval is not None and args.eval_interval > 0 and not has_sets:
        text = "without --eval-prompt-data or --eval-config there is nothing to evaluate: evaluation is off"
        groups.warn(args, f"--eval-interval {args.eval_interval}", text)
        args.eval_interval = None
    if has_sets and args.eval_interval is None:
        groups.warn(args, "--eval-interval", "not given: the evaluation sets are never used")
    if args.eval_prompt_data and len(args.eval_prompt_data) == 1:
        groups.warn(args, "--eval-prompt-data", "a file without a name: the set is called aime; NAME FILE names it")


def reward_keys(args: Namespace) -> None:
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
