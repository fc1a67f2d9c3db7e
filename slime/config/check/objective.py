"""The algorithm, and flags that cannot be combined with it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slime.algorithms.estimators import find_estimator
from slime.config import notices


def _estimator(args: Namespace) -> Iterator[str]:
    """KL counted twice, advantages without whitening, a custom loss without its function."""
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        yield (
            f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef} would count the KL divergence twice, in "
            f"the rewards and in the loss: drop one."
        )
    if find_estimator(args.advantage_estimator).needs_whitening and not args.normalize_advantages:
        yield f"--advantage-estimator {args.advantage_estimator} needs --normalize-advantages."
    if args.loss_type == "custom_loss" and args.custom_loss_function_path is None:
        yield "--loss-type custom_loss needs --custom-loss-function-path FUNCTION."


def _clipping(args: Namespace) -> Iterator[str]:
    """The bound of the dual clip."""
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c {args.eps_clip_c} must be above 1 (dual clip)."


def _importance_sampling(args: Namespace) -> Iterator[str]:
    """Weights between trainer and engine: exclusive modes, missing functions, bounds."""
    if args.use_rollout_logprobs and args.use_tis:
        yield (
            "--use-rollout-logprobs and --use-tis exclude each other: with the engine's log-probs as the old policy "
            "there is no gap to correct. Drop one."
        )
    if args.get_mismatch_metrics and args.custom_tis_function_path is None:
        yield "--get-mismatch-metrics needs --custom-tis-function-path FUNCTION, which measures them."
    threshold = args.tis_threshold
    if threshold is not None and threshold <= 0:
        yield f"--tis-threshold {threshold} must be above 0."
    if threshold is not None and threshold != args.tis_clip:
        yield f"--tis-threshold {threshold} and --tis-clip {args.tis_clip} are two names of one bound: drop one."
    if args.tis_clip_low > args.tis_clip:
        yield f"--tis-clip-low {args.tis_clip_low} must not be above --tis-clip {args.tis_clip}."


def _distillation(args: Namespace) -> Iterator[str]:
    """The teacher: its kind and its checkpoint."""
    if args.use_opd and args.opd_type is None:
        yield "--use-opd needs --opd-type: sglang or megatron."
    if args.use_opd and args.opd_type == "megatron" and args.opd_teacher_load is None:
        yield "--opd-type megatron needs --opd-teacher-load DIR, the checkpoint of the teacher."
    if args.use_opd and args.opd_type == "sglang" and args.opd_teacher_load is not None:
        yield "--opd-teacher-load is for --opd-type megatron; with sglang the teacher is the server of --rm-url."
    if args.opd_teacher_load is not None and not args.use_opd:
        yield "--opd-teacher-load needs --use-opd."


def _on_policy(args: Namespace) -> Iterator[str]:
    """Flags that contradict --true-on-policy-mode."""
    if not args.true_on_policy_mode:
        return
    rule = "--true-on-policy-mode trains every sample with the weights that generated it"
    if args.update_weights_interval != 1:
        yield f"--update-weights-interval {args.update_weights_interval} must be 1: {rule}."
    if args.async_buffer_size > 1:
        yield f"--async-buffer-size {args.async_buffer_size} must be 1: {rule}."
    if args.num_steps_per_rollout != 1:
        yield f"--num-steps-per-rollout {args.num_steps_per_rollout} must be 1: {rule}."
    for name in ("partial_rollout", "use_tis", "buffer_filter_path", "keep_old_actor"):
        if vars(args)[name]:
            yield f"--{name.replace('_', '-')} is not possible: {rule}."


def _optimizer(args: Namespace) -> Iterator[str]:
    """Requirements of --use-stateless-adam."""
    if args.use_stateless_adam and args.optimizer != "adam":
        yield f"--use-stateless-adam needs --optimizer adam, not {args.optimizer}."
    if args.use_stateless_adam and args.optimizer_cpu_offload:
        yield "--use-stateless-adam has no states to keep on the CPU: drop it or --optimizer-cpu-offload."
    if args.use_stateless_adam and not args.no_save_optim:
        yield "--use-stateless-adam has no state to save: it needs --no-save-optim."
    if args.use_stateless_adam and args.lr_decay_style != "constant":
        text = f"without a saved state, --lr-decay-style {args.lr_decay_style} begins anew when a run is resumed"
        notices.warn(args, "--use-stateless-adam", text)


def _weights_in_fp8(args: Namespace) -> Iterator[str]:
    """They cannot be moved away and back, or exchanged for others, without being rounded again."""
    if not args.fp8_param_gather:
        return
    # Each of these copies or exchanges the weights.
    exchanging = {
        "--use-kl-loss": args.use_kl_loss,
        f"--kl-coef {args.kl_coef}": args.kl_coef != 0,
        "--opd-type megatron": args.use_opd and args.opd_type == "megatron",
        "--keep-old-actor": args.keep_old_actor,
        "--offload-train": args.offload_train,
    }
    found = [flag for flag, is_on in exchanging.items() if is_on]
    if found:
        yield (
            f"--fp8-param-gather does not work with {', '.join(found)}: weights in FP8 cannot be put aside and taken "
            "back bit for bit. Drop one side."
        )


RULES = (_estimator, _clipping, _importance_sampling, _distillation, _on_policy, _optimizer, _weights_in_fp8)
