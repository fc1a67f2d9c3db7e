"""Flags of the objective: which loss, which advantages, how clipping, KL, entropy and off-policy terms enter it.

Read by the trainer (loss, credit, log-probs) and, for the reward flags, when samples become a batch. The functions of
this room take instances as settings. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from slime.algorithms import ESTIMATORS, default_estimator

CUDA_CHUNK_ROWS = 1024
"""Default of --log-probs-chunk-size on CUDA. The fp32 chunk of a vocabulary of 152k has 0.6 GB then."""


def _flag(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True)
class AlgorithmArgs:
    """Algorithm."""

    advantage_estimator: str = _flag(
        default_estimator(),
        "How rewards become per-token advantages, and which surrogate is optimised.",
        choices=ESTIMATORS,
    )
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = _flag(
        "policy_loss", "Training objective: clipped policy gradient, supervised, or --custom-loss-function-path."
    )
    eps_clip: float = _flag(0.2, "The probability ratio is clipped at 1 - EPS_CLIP from below.")
    eps_clip_high: float | None = _flag(
        None, "The ratio is clipped at 1 + EPS_CLIP_HIGH from above (default: --eps-clip)."
    )
    eps_clip_c: float | None = _flag(None, "Dual clip: bound (above 1) on the ratio if the advantage is negative.")
    value_clip: float = _flag(0.2, "A value estimate may move this far from the one at the start of the rollout.")
    kl_coef: float = _flag(
        0.0, "Weight of the KL divergence from the reference model inside the rewards (reinforce++ and ppo)."
    )
    use_kl_loss: bool = _flag(False, "Add the KL divergence from the reference model to the loss.")
    kl_loss_coef: float = _flag(0.0, "Weight of that KL term.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = _flag(
        "k1",
        "Estimator of the KL, in the loss and in the rewards. k1 in the loss has zero expected gradient on-policy; "
        "prefer k2 or low_var_kl there.",
    )
    use_unbiased_kl: bool = _flag(
        False, "Multiply the KL estimate in the loss by the importance ratio new / old policy."
    )
    entropy_coef: float = _flag(0.0, "Weight of the entropy bonus.")
    entropy_metric: bool = _flag(
        True,
        "Compute no entropy when --entropy-coef is 0: saves one chunk of memory, loses the metric entropy_loss.",
        off="--disable-entropy-metric",
    )
    calculate_per_token_loss: bool = _flag(
        False, "Mean over all trained tokens of a step instead of the mean over rollouts."
    )
    log_probs_chunk_size: int | None = _flag(
        None,
        "Rows of logits turned into log-probs at a time; -1 means all at once. "
        f"Default: {CUDA_CHUNK_ROWS} on CUDA, -1 on a CPU.",
    )
    gamma: float = _flag(1.0, "Discount per token (reinforce_plus_plus and ppo).")
    lambd: float = _flag(1.0, "Lambda of generalised advantage estimation (ppo).")
    gae_trained_tokens_only: bool = _flag(
        False,
        "Advantages step from one trained token to the next: values of tool and environment tokens, which no loss "
        "trains, stay out (ppo).",
    )
    critic_without_kl: bool = _flag(
        False, "The critic's returns leave out the penalty of --kl-coef, as in upstream slime (ppo)."
    )
    normalize_advantages: bool = _flag(
        False, "Shift and scale advantages to mean 0 and variance 1 over the trained tokens of all ranks."
    )
    rewards_normalization: bool = _flag(
        True, "Use rewards as they are, not relative to their group.", off="--disable-rewards-normalization"
    )
    grpo_std_normalization: bool = _flag(
        True,
        "Subtract the group's mean reward but do not divide by its standard deviation (Dr. GRPO).",
        off="--disable-grpo-std-normalization",
    )
    compute_advantages_and_returns: bool = _flag(
        True,
        "Run no reference or old policy and compute no advantages (supervised training).",
        off="--disable-compute-advantages-and-returns",
    )
    use_rollout_logprobs: bool = _flag(
        False, "Take the engine's log-probs as the old policy and skip the trainer's pass."
    )
    use_tis: bool = _flag(
        False, "Weight every token by the probability ratio trainer / engine, truncated to the --tis-clip bounds."
    )
    tis_clip: float = _flag(2.0, "Upper bound of that weight.")
    tis_clip_low: float = _flag(0.0, "Lower bound of that weight.")
    tis_threshold: float | None = _flag(None, "Older name of --tis-clip.")
    custom_tis_function_path: str | None = _flag(
        None, "Function that replaces the truncated weights: rejection, other levels, other metrics."
    )
    get_mismatch_metrics: bool = _flag(
        False, "Report what --custom-tis-function-path measures without letting it change the loss."
    )
    use_opsm: bool = _flag(
        False, "Drop tokens with negative advantage from sequences that the old policy has drifted away from."
    )
    opsm_delta: float = _flag(1e-4, "Mean of log(old / new) per token above which a sequence counts as drifted.")
    use_rollout_entropy: bool = _flag(
        False, "Report the entropy of the old policy as rollout/entropy; runs its pass even if it could be skipped."
    )
    true_on_policy_mode: bool = _flag(
        False, "Insist on strictly on-policy steps and report how far trainer and engine log-probs are apart."
    )
    custom_loss_function_path: str | None = _flag(None, "Function of the objective with --loss-type custom_loss.")
    custom_advantage_function_path: str | None = _flag(
        None, "Function that fills advantages and returns in place of --advantage-estimator."
    )
    rollout_data_postprocess_path: str | None = _flag(
        None, "Function f(args, rollout_id, rollout_data) called once log-probs and advantages of a batch are known."
    )
    custom_pg_loss_reducer_function_path: str | None = _flag(
        None, "Function that makes the reducer of the policy-gradient term (not of KL, entropy and metrics)."
    )

    @property
    def wants_entropy(self) -> bool:
        """Whether the loss needs the entropy, as a term or as a metric."""
        return self.entropy_metric or self.entropy_coef != 0

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """How far the ratio may leave 1, (below, above)."""
        return self.eps_clip, self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


@dataclass(frozen=True)
class DistillationArgs:
    """On-policy distillation."""

    use_opd: bool = _flag(False, "Subtract the reverse KL from a teacher, per token, from the advantages.")
    opd_type: Literal["sglang", "megatron"] | None = _flag(
        None,
        "Who computes the teacher's log-probs: a server during the rollout (sglang) or the trainer (megatron). "
        "Required with --use-opd.",
    )
    opd_kl_coef: float = _flag(1.0, "Weight of that reverse KL.")
    opd_teacher_load: str | None = _flag(
        None, "Checkpoint of the teacher for --opd-type megatron; it has the architecture of the model that is trained."
    )
    opd_teacher_ckpt_step: int | None = _flag(None, "Iteration of --opd-teacher-load to take instead of the latest.")


@dataclass(frozen=True)
class ModelCopyArgs:
    """Reference model, critic and optimizer over the run."""

    ref_update_interval: int | None = _flag(
        None, "The reference model becomes a copy of the trained one every N rollouts."
    )
    keep_old_actor: bool = _flag(
        False,
        "Keep the weights that generated each rollout and take the old policy's log-probs from them "
        "(train_async.py, where the trainer has moved on since).",
    )
    num_critic_only_steps: int = _flag(0, "First rollouts that train the critic only (ppo).")
    reset_optimizer_states: bool = _flag(False, "Forget the optimizer's moments before every rollout.")
    use_stateless_adam: bool = _flag(False, "Adam without moments kept between steps. Needs --no-save-optim.")
    use_routing_replay: bool = _flag(False, "Replay the expert choices of the log-prob pass in training.")
    use_rollout_routing_replay: bool = _flag(False, "Replay the engine's expert choices in training.")
    megatron_config_path: str | None = _flag(
        None, "YAML file with values that differ for the roles actor and critic.", metavar="FILE"
    )


def needs_reference(args: Any) -> bool:
    """Whether a reference model takes part in the objective, as a loss or in the rewards.

    Args:
        args: the run's arguments, or those of the algorithm alone.
    """
    return bool(args.use_kl_loss or args.kl_coef != 0)
