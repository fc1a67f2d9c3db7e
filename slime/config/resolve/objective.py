"""Values that follow from the algorithm: clipping, KL, normalization, on-policy guarantees, recomputation."""

from __future__ import annotations

from argparse import Namespace

from slime.algorithms.estimators import Estimator, find_estimator
from slime.config import groups
from slime.config.groups import flag_of
from slime.utils import accelerator


def clipping(args: Namespace) -> None:
    """The upper bound of the ratio defaults to the lower one. --tis-threshold is an older name of --tis-clip."""
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    estimator = find_estimator(args.advantage_estimator)
    if estimator.paper_eps_clip is not None and args.eps_clip < estimator.paper_eps_clip:
        text = (
            f"{estimator.name} cuts off small ratios too; its paper uses {estimator.paper_eps_clip:g} here and a large "
        )
        text += "--eps-clip-high"
        groups.warn(args, f"--eps-clip {args.eps_clip}", text)
    if args.tis_threshold is not None and "tis_clip" not in args.given:
        args.tis_clip = args.tis_threshold
        if not args.use_tis:
            groups.warn(args, f"--tis-threshold {args.tis_threshold}", "no effect without --use-tis")
        if args.tis_threshold < 1:
            text = "a cap below 1 makes every weight smaller than 1, also where trainer and engine agree"
            groups.info(args, f"--tis-threshold {args.tis_threshold}", text)


def learning_rate(args: Namespace) -> None:
    if "lr" not in args.given and not args.debug_rollout_only:
        text = f"not given: {args.lr:g}, which suits models of billions of parameters. Small ones need more"
        groups.info(args, "--lr", text)


def kl_estimator(args: Namespace) -> None:
    if args.use_kl_loss and args.kl_loss_coef != 0 and "kl_loss_type" not in args.given:
        text = "not given: k1, whose gradient is zero in expectation as a loss; use k2 or low_var_kl"
        groups.warn(args, "--kl-loss-type", text)
    estimator = find_estimator(args.advantage_estimator)
    is_read = estimator.has_kl_in_rewards or args.custom_advantage_function_path is not None
    if args.kl_coef != 0 and not is_read:
        text = f"{args.kl_coef} has no effect with --advantage-estimator {args.advantage_estimator}; use --use-kl-loss"
        groups.warn(args, "--kl-coef", text)
    if args.kl_coef != 0 and estimator.needs_critic and args.lambd < 1:
        text = "the critic learns the task's reward alone: advantages miss the penalty of tokens beyond --lambd's reach"
        groups.info(args, "--kl-coef", text)
    if args.gae_trained_tokens_only and not estimator.needs_critic:
        text = f"no effect with --advantage-estimator {args.advantage_estimator}"
        groups.warn(args, "--gae-trained-tokens-only", text)


def unread(args: Namespace) -> None:
    """Report given flags of the objective that nothing reads."""
    estimator = find_estimator(args.advantage_estimator)
    needed = (
        ("kl_loss_coef use_unbiased_kl", args.use_kl_loss, "--use-kl-loss"),
        ("opsm_delta", args.use_opsm, "--use-opsm"),
        ("opd_kl_coef opd_type", args.use_opd, "--use-opd"),
        (
            "tis_clip tis_clip_low custom_tis_function_path",
            args.use_tis or args.get_mismatch_metrics,
            "--use-tis or --get-mismatch-metrics",
        ),
        ("custom_loss_function_path", args.loss_type == "custom_loss", "--loss-type custom_loss"),
        ("eps_clip_c", estimator.surrogate == Estimator.surrogate, "an --advantage-estimator with PPO's surrogate"),
        ("gamma", not estimator.credit.endswith(":group_relative"), "an --advantage-estimator that discounts rewards"),
        ("num_critic_only_steps value_clip lambd", estimator.needs_critic, "an --advantage-estimator with a critic"),
    )
    for names, is_on, switch in needed:
        for name in names.split():
            if name in args.given and vars(args)[name] and not is_on:
                groups.warn(args, flag_of(name), f"no effect without {switch}")
    if args.loss_type != "sft_loss":
        return
    for name in ("use_kl_loss", "kl_coef", "entropy_coef", "use_tis", "use_opsm", "use_opd"):
        if vars(args)[name]:
            groups.warn(args, flag_of(name), "no effect with --loss-type sft_loss")


def group_normalization(args: Namespace) -> None:
    """One sample has no deviation to divide by."""
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False


def true_on_policy(args: Namespace) -> None:
    """Numerics of trainer and engine that can agree. The checks find contradictions."""
    if not args.true_on_policy_mode:
        return
    args.deterministic_mode = True
    if accelerator.current().is_cpu or args.debug_train_only:
        return  # the CPU engine has one kernel per operation, and no such switch
    if not vars(args).get("sglang_enable_deterministic_inference"):
        # Both: engines parse ``sglang_argv``, and slime reads the attribute.
        args.sglang_enable_deterministic_inference = True
        args.sglang_argv = [*args.sglang_argv, "--enable-deterministic-inference"]
        groups.info(args, "--sglang-enable-deterministic-inference", "on, because of --true-on-policy-mode")


def routing_replay(args: Namespace) -> None:
    """Replaying the engine's choices implies replaying."""
    if args.use_rollout_routing_replay:
        args.use_routing_replay = True


def recomputation(args: Namespace) -> None:
    """Derive Megatron's recomputation. --gradient-checkpointing means full recomputation of every layer."""
    if args.recompute_granularity == "full" and args.recompute_method is None:
        args.recompute_method = "uniform"
        groups.info(args, "--recompute-method", "uniform: --recompute-granularity full does not say which layers")
    if (
        args.recompute_granularity == "full"
        and args.recompute_method == "uniform"
        and args.recompute_num_layers is None
    ):
        args.recompute_num_layers = 1
        groups.info(args, "--recompute-num-layers", "1: every layer is a recompute unit")
    if not args.gradient_checkpointing:
        return
    own = sorted(name for name in args.given if name.startswith("recompute_"))
    if own:
        flags = ", ".join(map(flag_of, own))
        groups.info(args, "--gradient-checkpointing", f"{flags} decide what is recomputed")
        return
    args.recompute_granularity, args.recompute_method, args.recompute_num_layers = "full", "uniform", 1
