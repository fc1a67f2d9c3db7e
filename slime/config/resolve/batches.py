"""Batch sizes and the length of the run.

--rollout-batch-size x --n-samples-per-prompt = --global-batch-size x --num-steps-per-rollout
"""

from __future__ import annotations

from argparse import Namespace

from slime.algorithms.estimators import find_estimator
from slime.config import notices
from slime.models.config_json import read_model_config, text_part

_DEFAULT_ROLLOUT_BATCH = 32
_DEFAULT_GROUP = 8


def rollout_batch(args: Namespace) -> None:
    if args.rollout_batch_size is None:
        args.rollout_batch_size = _DEFAULT_ROLLOUT_BATCH
        notices.warn(args, "--rollout-batch-size", f"not given: {_DEFAULT_ROLLOUT_BATCH} prompts per rollout")
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
        notices.info(args, "--n-samples-per-prompt", f"{text}--rollout-batch-size {prompts}")
        return
    args.n_samples_per_prompt = _DEFAULT_GROUP
    text = f"not given: {_DEFAULT_GROUP} responses per prompt, because {args.advantage_estimator} compares them"
    notices.warn(args, "--n-samples-per-prompt", text)


def global_batch(args: Namespace) -> None:
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.global_batch_size is None:  # one step per rollout, not Megatron's micro batch x data parallel
        steps = args.num_steps_per_rollout
        args.global_batch_size = max(1, samples // steps) if steps is not None and steps > 0 else samples
        if steps is None:
            text = f"{samples}: one optimizer step per rollout"
            notices.info(args, "--global-batch-size", text)
    if args.num_steps_per_rollout is None and args.global_batch_size > 0:
        args.num_steps_per_rollout = max(1, samples // args.global_batch_size)


def micro_batch_budget(args: Namespace) -> None:
    if args.use_dynamic_batch_size and args.log_probs_max_tokens_per_gpu is None:
        args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    if args.balance_by_flops:
        args.balance_data = True


def run_length(args: Namespace) -> None:
    if args.num_rollout is not None and args.num_epoch is not None:
        notices.warn(args, "--num-epoch", f"ignored, because --num-rollout {args.num_rollout} decides")
    elif args.num_rollout is None and args.num_epoch is None and args.rollout_global_dataset:
        args.num_epoch = 1
        notices.warn(args, "--num-rollout", "neither it nor --num-epoch is given: one epoch")


# Lengths of prompts and responses, evaluation, reward keys.

_DEFAULT_RESPONSE_LEN = 1024


def lengths(args: Namespace) -> None:
    """The context limit decides the limits of prompt and response that are not given."""
    engine_limit = vars(args).get("sglang_context_length")
    if args.rollout_max_context_len is None and isinstance(engine_limit, int) and engine_limit > 1:
        args.rollout_max_context_len = engine_limit
        notices.info(args, "--rollout-max-context-len", f"{engine_limit}: the limit of the engines")
    context = args.rollout_max_context_len
    if args.rollout_max_response_len is None:
        args.rollout_max_response_len = _response_len(args, context)
        if not args.debug_train_only:  # otherwise nothing is generated
            text = f"not given: {args.rollout_max_response_len} tokens"
            notices.warn(args, "--rollout-max-response-len", text)
    elif context is None and (model := _model_context(args.hf_checkpoint)) and args.rollout_max_response_len >= model:
        text = f"the model of --hf-checkpoint takes {model} tokens, prompt and response together"
        notices.warn(args, f"--rollout-max-response-len {args.rollout_max_response_len}", text)
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
        notices.warn(args, "--eval-prompt-data", "ignored, because --eval-config decides")
        args.eval_prompt_data = None
    has_sets = args.eval_config is not None or bool(args.eval_prompt_data)
    if args.eval_interval is not None and args.eval_interval > 0 and not has_sets:
        text = "without --eval-prompt-data or --eval-config there is nothing to evaluate: evaluation is off"
        notices.warn(args, f"--eval-interval {args.eval_interval}", text)
        args.eval_interval = None
    if has_sets and args.eval_interval is None:
        notices.warn(args, "--eval-interval", "not given: the evaluation sets are never used")
    if args.eval_prompt_data and len(args.eval_prompt_data) == 1:
        notices.warn(args, "--eval-prompt-data", "a file without a name: the set is called aime; NAME FILE names it")


def reward_keys(args: Namespace) -> None:
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
