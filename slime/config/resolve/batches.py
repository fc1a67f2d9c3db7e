"""Batch sizes and the length of the run.

--rollout-batch-size x --n-samples-per-prompt = --global-batch-size x --num-steps-per-rollout
"""

from __future__ import annotations

from argparse import Namespace

from slime.algorithms.estimators import find_estimator
from slime.config import notices

__all__ = [
    "global_batch",
    "group_size",
    "is_group_relative",
    "micro_batch_budget",
    "rollout_batch",
    "run_length",
]

_DEFAULT_ROLLOUT_BATCH = 32
_DEFAULT_GROUP = 8


def rollout_batch(args: Namespace) -> None:
    if args.rollout_batch_size is None:  # D24
        args.rollout_batch_size = _DEFAULT_ROLLOUT_BATCH
        notices.warn(args, "--rollout-batch-size", f"not given: {_DEFAULT_ROLLOUT_BATCH} prompts per rollout")
    if args.over_sampling_batch_size is None:  # B36
        args.over_sampling_batch_size = args.rollout_batch_size


def is_group_relative(args: Namespace) -> bool:
    """Whether a sample's advantage is relative to the other samples of its prompt."""
    is_centered = args.rewards_normalization and find_estimator(args.advantage_estimator).is_centered
    has_advantages = args.loss_type == "policy_loss" and args.compute_advantages_and_returns
    return bool(is_centered and has_advantages and args.custom_advantage_function_path is None)


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
    if args.global_batch_size is None:  # B34; D5: one step per rollout, not Megatron's micro batch x data parallel
        steps = args.num_steps_per_rollout
        args.global_batch_size = max(1, samples // steps) if steps is not None and steps > 0 else samples
        if steps is None:
            text = f"{samples}: one optimizer step per rollout"
            notices.info(args, "--global-batch-size", text)
    if args.num_steps_per_rollout is None and args.global_batch_size > 0:
        args.num_steps_per_rollout = max(1, samples // args.global_batch_size)


def micro_batch_budget(args: Namespace) -> None:
    """B16, B17."""
    if args.use_dynamic_batch_size and args.log_probs_max_tokens_per_gpu is None:
        args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    if args.balance_by_flops:
        args.balance_data = True


def run_length(args: Namespace) -> None:
    """B37, D23."""
    if args.num_rollout is not None and args.num_epoch is not None:
        notices.warn(args, "--num-epoch", f"ignored, because --num-rollout {args.num_rollout} decides")
    elif args.num_rollout is None and args.num_epoch is None and args.rollout_global_dataset:
        args.num_epoch = 1
        notices.warn(args, "--num-rollout", "neither it nor --num-epoch is given: one epoch")
