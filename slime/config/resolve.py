"""Derived values: ordered steps, each with one subject. The only code that writes to ``args`` after parsing.

Numbers like D5 refer to the decisions that keep older launch scripts working; every step that replaces a missing value
says so in the log.
"""

from __future__ import annotations

import logging
import os
import time
from argparse import Namespace
from pathlib import Path

__all__ = ["resolve"]

logger = logging.getLogger(__name__)

_PATHS = (
    "hf_checkpoint",
    "prompt_data",
    "output_dir",
    "load",
    "save",
    "save_hf",
    "ref_load",
    "save_debug_rollout_data",
    "load_debug_rollout_data",
)
_DEFAULT_ROLLOUT_BATCH = 32
_DEFAULT_RESPONSE_LEN = 1024


def resolve(args: Namespace) -> None:
    """Fill in everything that follows from what was given. Pure apart from looking at local files."""
    for step in (
        _names_and_paths,
        _debug_modes,
        _batch_sizes,
        _run_length,
        _checkpoints,
        _reference_model,
        _lengths,
        _algorithm,
        _rewards,
        _evaluation,
        _devices,
    ):
        step(args)


def _names_and_paths(args: Namespace) -> None:
    """One name for the run, and paths that mean the same in every process, whatever its working directory."""
    args.experiment_name = args.experiment_name or args.tb_experiment_name or time.strftime("%Y%m%d_%H%M%S")
    for name in _PATHS:
        value = getattr(args, name)
        if value is not None:
            setattr(args, name, os.path.abspath(os.path.expanduser(value)))
    if args.eval_prompt_data and len(args.eval_prompt_data) % 2 == 0:
        pairs = args.eval_prompt_data
        args.eval_prompt_data = [os.path.abspath(item) if i % 2 else item for i, item in enumerate(pairs)]
    for name in vars(args):
        value = getattr(args, name)
        is_hook = name.endswith("_path") and isinstance(value, str)
        if is_hook and (value.split(":")[0].endswith(".py")) and os.path.isfile(value.split(":")[0]):
            setattr(args, name, os.path.abspath(value))


def _debug_modes(args: Namespace) -> None:
    if args.load_debug_rollout_data is not None:
        args.debug_train_only = True
    if args.debug_rollout_only and args.rollout_num_gpus is None:
        args.rollout_num_gpus = args.rollout_num_gpus_per_engine


def _batch_sizes(args: Namespace) -> None:
    if args.rollout_batch_size is None:  # D24
        args.rollout_batch_size = _DEFAULT_ROLLOUT_BATCH
        logger.warning("--rollout-batch-size is not given: using %d prompts per rollout.", args.rollout_batch_size)
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.global_batch_size is None:  # D5: one step per rollout, not Megatron's micro batch x data parallel
        args.global_batch_size = max(1, samples // (args.num_steps_per_rollout or 1))
    if args.num_steps_per_rollout is None:
        args.num_steps_per_rollout = max(1, samples // args.global_batch_size)
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size


def _run_length(args: Namespace) -> None:
    if args.num_rollout is None and args.num_epoch is None and args.rollout_global_dataset:  # D23
        args.num_epoch = 1
        logger.warning("neither --num-rollout nor --num-epoch is given: training for one epoch.")
    if args.num_rollout is not None and args.num_epoch is not None:
        logger.warning("--num-rollout %d decides; --num-epoch is ignored.", args.num_rollout)


def _checkpoints(args: Namespace) -> None:
    if args.save_interval is not None and args.save is None:  # D10
        args.save = str(Path(args.output_dir) / "checkpoints")
        logger.warning("--save-interval without --save: checkpoints go to %s.", args.save)


def _reference_model(args: Namespace) -> None:
    if args.ref_load is None and args.use_kl_loss:  # D9
        args.ref_load = args.hf_checkpoint


def _lengths(args: Namespace) -> None:
    context = args.rollout_max_context_len
    if args.rollout_max_response_len is None:  # D13
        args.rollout_max_response_len = _DEFAULT_RESPONSE_LEN if context is None else max(1, context // 2)
        logger.warning("--rollout-max-response-len is not given: using %d tokens.", args.rollout_max_response_len)
    if context is not None and args.rollout_max_prompt_len is None:
        args.rollout_max_prompt_len = context - 1
    if args.eval_max_context_len is None:
        args.eval_max_context_len = context


def _algorithm(args: Namespace) -> None:
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False


def _rewards(args: Namespace) -> None:
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
    generates = not args.debug_train_only and args.loss_type == "policy_loss"
    if generates and args.rm_type is None and args.custom_rm_path is None:  # D12
        args.rm_type = "math"
        logger.warning("neither --rm-type nor --custom-rm-path is given: rewards come from the math grader.")


def _evaluation(args: Namespace) -> None:
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.eval_interval is not None and not args.eval_prompt_data:  # D10
        logger.warning("--eval-interval %d without --eval-prompt-data: evaluation is off.", args.eval_interval)
        args.eval_interval = None


def _devices(args: Namespace) -> None:
    if args.debug_train_only:
        args.rollout_num_gpus = 0
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    args.rank = 0
