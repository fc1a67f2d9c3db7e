"""Values that follow from the algorithm: clipping, KL, normalization, on-policy guarantees, recomputation."""

from __future__ import annotations

from argparse import Namespace

from slime.algorithms import Estimator, find_estimator
from slime.algorithms.arguments import needs_reference
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
    if args.gae_trained_tokens_only and not estimator.needs_critic:
        text = f"no effect with --advantage-estimator {args.advantage_estimator}"
        groups.warn(args, "--gae-trained-tokens-only", text)


def unread(args: Namespace) -> None:
    """Report given flags that nothing reads in this combination."""
    for names, is_read, needed in (*_objective(args), *_trainer(args), *_observers(args)):
        for name in names.split():
            if name in args.given and vars(args)[name] and not is_read:
                groups.warn(args, flag_of(name), f"no effect without {needed}")
    if args.loss_type != "sft_loss":
        return
    for name in ("use_kl_loss", "kl_coef", "entropy_coef", "use_tis", "use_opsm", "use_opd", "normalize_advantages"):
        if vars(args)[name]:
            groups.warn(args, flag_of(name), "no effect with --loss-type sft_loss")


# (names of flags, whether they are read, what they need)
Readers = tuple[tuple[str, bool, str], ...]


def _objective(args: Namespace) -> Readers:
    estimator = find_estimator(args.advantage_estimator)
    weights = args.use_tis or args.get_mismatch_metrics
    return (
        ("kl_loss_coef use_unbiased_kl", args.use_kl_loss, "--use-kl-loss"),
        ("kl_loss_type ref_update_interval", needs_reference(args), "--use-kl-loss or --kl-coef"),
        ("opsm_delta", args.use_opsm, "--use-opsm"),
        ("opd_kl_coef opd_type", args.use_opd, "--use-opd"),
        ("opd_teacher_ckpt_step", args.opd_teacher_load is not None, "--opd-teacher-load"),
        ("tis_clip tis_clip_low custom_tis_function_path", weights, "--use-tis or --get-mismatch-metrics"),
        ("custom_loss_function_path", args.loss_type == "custom_loss", "--loss-type custom_loss"),
        ("custom_pg_loss_reducer_function_path", args.loss_type == "policy_loss", "--loss-type policy_loss"),
        ("eps_clip_c", estimator.surrogate == Estimator.surrogate, "an --advantage-estimator with PPO's surrogate"),
        ("gamma", not estimator.credit.endswith(":group_relative"), "an --advantage-estimator that discounts rewards"),
        ("num_critic_only_steps value_clip lambd", estimator.needs_critic, "an --advantage-estimator with a critic"),
        ("critic_without_kl", estimator.needs_critic and args.kl_coef != 0, "--kl-coef of a run with a critic"),
        (
            "use_routing_replay",
            _records_experts(args),
            "a pass before training, such as with --num-steps-per-rollout 2",
        ),
        # otherwise the weights that training starts from are those that generated the rollout
        (
            "keep_old_actor",
            args.is_async or args.update_weights_interval > 1,
            "train_async.py or --update-weights-interval 2",
        ),
    )


def _records_experts(args: Namespace) -> bool:
    """Whether a pass for old log-probs comes before the steps, whose experts they repeat, or engines chose them."""
    # as backends.training.credit.passes_needed, which imports torch
    others = (
        *(args.use_rollout_routing_replay, args.num_steps_per_rollout != 1, args.use_rollout_entropy, args.use_opd),
        *(args.kl_coef, args.custom_advantage_function_path, args.rollout_data_postprocess_path),
    )
    return any(others) or args.loss_type == "custom_loss"


def _trainer(args: Namespace) -> Readers:
    decays, rotates = args.lr_decay_style != "constant", "muon" in args.optimizer
    muon = "muon_momentum muon_num_ns_steps muon_scale_mode muon_extra_scale_factor muon_tp_mode muon_fp32_matmul_prec"
    return (
        ("max_tokens_per_gpu", args.use_dynamic_batch_size, "--use-dynamic-batch-size"),
        ("mtp_loss_scaling_factor", args.enable_mtp_training, "--enable-mtp-training"),
        ("lora_alpha lora_dropout", args.lora_rank != 0, "--lora-rank"),
        ("min_lr lr_decay_iters", decays, "an --lr-decay-style that decays"),
        ("lr_wsd_decay_style", args.lr_decay_style == "WSD", "--lr-decay-style WSD"),
        ("sgd_momentum", args.optimizer == "sgd", "--optimizer sgd"),
        ("adam_beta1 adam_beta2 adam_eps", args.optimizer != "sgd", "--optimizer adam"),
        (muon, rotates, "--optimizer muon"),
        (
            "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d",
            args.optimizer_cpu_offload,
            "--optimizer-cpu-offload",
        ),
    )


def _observers(args: Namespace) -> Readers:
    ahead = args.is_async or "fully_async" in args.rollout_function_path
    replays, profiles = args.load_debug_rollout_data is not None, args.use_pytorch_profiler
    memory = "memory_snapshot_path memory_snapshot_dir memory_snapshot_num_steps memory_recorder"
    wandb = "wandb_mode wandb_dir wandb_key wandb_host wandb_team wandb_group wandb_run_id"
    return (
        ("load_debug_rollout_data_subsample", replays, "--load-debug-rollout-data"),
        ("max_weight_staleness", ahead, "train_async.py"),
        ("background_eval", args.eval_interval is not None, "--eval-interval"),
        ("fetch_trajectory_retry_times rollout_task_type", bool(args.rollout_buffer_url), "--rollout-buffer-url"),
        ("profile_target profile_step_start profile_step_end tensorboard_dir", profiles, "--use-pytorch-profiler"),
        (memory, args.record_memory_history, "--record-memory-history"),
        ("metrics_host", args.metrics_port is not None, "--metrics-port"),
        ("trace_share", args.trace_endpoint is not None, "--trace-endpoint"),
        ("tb_project_name tb_experiment_name", args.use_tensorboard, "--use-tensorboard"),
        (wandb, args.use_wandb, "--use-wandb"),
    )


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
