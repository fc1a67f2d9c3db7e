"""Modes, devices, weight synchronisation, asynchronous training."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slime.config import notices

__all__ = ["RULES"]


def _modes(args: Namespace) -> Iterator[str]:
    if args.debug_rollout_only and args.debug_train_only:  # B28
        cause = "--load-debug-rollout-data" if "debug_train_only" not in args.given else "--debug-train-only"
        yield f"--debug-rollout-only and {cause} exclude each other: drop one."
    if sum((args.bf16, args.fp16, args.fp32)) > 1:
        yield "--bf16, --fp16 and --fp32 exclude each other: keep one (bf16 is the default)."


def _devices(args: Namespace) -> Iterator[str]:
    total, per_engine, per_node = args.rollout_num_gpus, args.rollout_num_gpus_per_engine, args.num_gpus_per_node
    if args.rollout_external or min(per_engine, per_node) < 1:
        return
    if total < 0:
        yield f"--rollout-num-gpus {total} must not be negative."
    elif total % per_engine and args.sglang_config is None:  # groups of a file have widths of their own
        yield (
            f"--rollout-num-gpus {total} must be a multiple of --rollout-num-gpus-per-engine {per_engine}: the rest "
            f"would idle."
        )
    if per_engine > per_node and per_engine % per_node:
        yield (
            f"--rollout-num-gpus-per-engine {per_engine} is more than --num-gpus-per-node {per_node}: it must then be "
            f"a multiple of it."
        )
    elif per_engine > per_node and total and args.sglang_config is None:
        first = 0 if args.colocate or args.debug_rollout_only else args.world_size
        if first % per_node:
            yield (
                f"--rollout-num-gpus-per-engine {per_engine}: behind the {first} devices of the trainer an engine over "
                f"several nodes would begin in the middle of one (--num-gpus-per-node {per_node}): give the trainer "
                f"whole nodes."
            )


def _drivers(args: Namespace) -> Iterator[str]:
    if args.async_buffer_size < 1:
        yield f"--async-buffer-size {args.async_buffer_size} must be at least 1."
    if args.is_async and args.colocate:  # B75
        yield "--colocate does not work with train_async.py, where engines and trainer work at once: use train.py."
    elif args.is_async and args.offload_rollout:
        yield "--offload-rollout does not work with train_async.py, whose engines work all the time: drop it."
    elif args.offload_rollout and not args.colocate:
        notices.warn(args, "--offload-rollout", "no effect: without --colocate engines have devices of their own")
    if args.is_async and args.true_on_policy_mode:
        yield "--true-on-policy-mode does not work with train_async.py, which generates ahead: use train.py."
    if not args.is_async and "async_buffer_size" in args.given:
        notices.warn(args, f"--async-buffer-size {args.async_buffer_size}", "no effect: only train_async.py reads it")
    if args.is_async and 1 < args.update_weights_interval < args.async_buffer_size:
        text = f"weights lag behind by up to --async-buffer-size {args.async_buffer_size} rollouts anyway"
        notices.info(args, f"--update-weights-interval {args.update_weights_interval}", text)


def _weight_sync(args: Namespace) -> Iterator[str]:
    """B44-B46."""
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        yield "--update-weight-transport disk needs --update-weight-disk-dir DIR, a directory that every node sees."
    if args.release_train:
        if args.train_backend != "megatron":
            yield f"--release-train works with --train-backend megatron only, not {args.train_backend}."
        if args.use_critic:
            yield (
                f"--release-train does not work with a critic (--advantage-estimator {args.advantage_estimator}): "
                "drop one."
            )
        if args.keep_old_actor:
            yield "--release-train keeps nothing between rollouts: drop --keep-old-actor."
        if args.save is None:
            yield "--release-train starts every step from a checkpoint: it needs --save DIR."
        if (args.update_weight_mode, args.update_weight_transport) != ("full", "disk"):
            yield "--release-train needs --update-weight-mode full and --update-weight-transport disk."
    if args.update_weight_mode == "delta":
        if args.update_weight_transport != "disk":
            yield "--update-weight-mode delta needs --update-weight-transport disk."
        if args.colocate:
            yield "--update-weight-mode delta does not work with --colocate: drop one."
        if args.update_weight_local_checkpoint_dir is None:
            yield "--update-weight-mode delta needs --update-weight-local-checkpoint-dir DIR on the engine hosts."


RULES = (_modes, _devices, _drivers, _weight_sync)
