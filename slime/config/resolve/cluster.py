"""Modes, devices, offloading, and environment variables of launch scripts."""

from __future__ import annotations

import os
from argparse import Namespace

from slime.algorithms.estimators import find_estimator
from slime.config import notices
from slime.utils.errors import ConfigError


def modes(args: Namespace) -> None:
    """Derive the modes that replayed dumps and external engines imply."""
    if args.load_debug_rollout_data is not None and not args.debug_train_only:
        args.debug_train_only = True
        notices.info(args, "--debug-train-only", "on, because --load-debug-rollout-data replaces the engines")
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
        notices.warn(args, "--colocate", "no effect: --rollout-num-gpus 0 starts no engine on the trainer's devices")
        args.colocate = args.offload_rollout = False
    if args.debug_rollout_only:  # no trainer to share devices with
        if args.colocate and args.rollout_num_gpus is None:
            args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
        args.colocate = args.offload_train = args.offload_rollout = False
    if args.colocate and args.release_train:
        if args.offload_train or args.offload_rollout is False:
            notices.warn(
                args, "--release-train", "it decides: trainers end instead of being offloaded, engines offload"
            )
        # Trainer processes that end have nothing to offload.
        args.offload_train, args.offload_rollout = False, True
    elif args.colocate:
        args.offload_train = True if args.offload_train is None else args.offload_train
        args.offload_rollout = True if args.offload_rollout is None else args.offload_rollout
    # Actor and critic share the devices, so one of them must be away while the other works.
    if args.use_critic and not args.offload_train and not args.debug_rollout_only:
        if args.offload_train is False:
            notices.warn(args, "--no-offload-train", "actor and critic share devices: the trainer is offloaded")
        args.offload_train = True
    args.offload_train = bool(args.offload_train)
    args.offload_rollout = bool(args.offload_rollout)
    if args.offload_train:
        args.disable_grad_buffers_cpu_backup = args.disable_param_buffers_cpu_backup = True


def devices(args: Namespace) -> None:
    """Derive the number of slots of engines and trainer."""
    if args.colocate and args.rollout_num_gpus is None:
        args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
        notices.info(args, "--rollout-num-gpus", f"{args.rollout_num_gpus}: all devices of the trainer (--colocate)")
    if args.debug_rollout_only and args.rollout_num_gpus is None:
        args.rollout_num_gpus = args.rollout_num_gpus_per_engine
        notices.info(args, "--rollout-num-gpus", f"{args.rollout_num_gpus}: one engine (--debug-rollout-only)")
    if args.debug_train_only:
        args.rollout_num_gpus = 0
    elif args.rollout_num_gpus == 0 and not args.rollout_external:
        text = "the router only: engines are those that others register with it, such as behind --sglang-router-ip"
        notices.info(args, "--rollout-num-gpus 0", text)
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.rollout_num_gpus is None and not args.rollout_external:
        width = max(1, args.rollout_num_gpus_per_engine)
        args.rollout_num_gpus = -(-args.world_size // width) * width
        count = args.rollout_num_gpus
        text = f"not given: {count} device{'s' * (count != 1)}, as many as the trainer has"
        text += "" if args.rollout_num_gpus == args.world_size else f", rounded up to engines of {width}"
        notices.warn(args, "--rollout-num-gpus", text)
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
        notices.warn(args, "--rollout-num-gpus-per-engine", text)


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
            notices.warn(args, name, f"has no effect: {why}.")
