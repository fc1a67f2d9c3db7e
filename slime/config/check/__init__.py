"""Rules over the resolved arguments. Every rule returns problems. The caller reports all of them in one message.

A problem is one sentence: the flag, its value, the rule, the fix. ``slime.ray.arguments`` passes in the rules of other
rooms (hooks, model shape, engines).
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence

from slime.config.check import cluster, objective, paths
from slime.config.groups import flag_of
from slime.config.yaml_file import overwritten_keys
from slime.utils.errors import SlimeError

# (rule, its condition, names of the flags) for every number. Unset flags are skipped.
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "must be at least 1",
        lambda value: value >= 1,
        """
            rollout_batch_size n_samples_per_prompt global_batch_size num_steps_per_rollout
            micro_batch_size save_interval eval_interval update_weights_interval ref_update_interval
            actor_num_nodes actor_num_gpus_per_node rollout_num_gpus_per_engine num_gpus_per_node
            update_weight_buffer_size rollout_max_response_len rollout_max_prompt_len
            rollout_max_context_len eval_max_response_len eval_max_prompt_len eval_max_context_len
            n_samples_per_eval_prompt sglang_server_concurrency sglang_router_request_timeout_secs
            num_epoch max_turns keep_last_checkpoints max_tokens_per_gpu log_probs_max_tokens_per_gpu
            max_position_embeddings data_pad_size_multiplier
        """,
    ),
    (
        "must not be negative",
        lambda value: value >= 0,
        """
            num_rollout start_rollout_id num_data_workers max_sample_retries max_weight_staleness
            num_critic_only_steps eval_min_new_tokens ckpt_step ref_ckpt_step opd_teacher_ckpt_step
            eps_clip eps_clip_high value_clip tis_clip_low opd_kl_coef kl_coef kl_loss_coef lr min_lr
            weight_decay clip_grad init_method_std moe_router_bias_update_rate mtp_loss_scaling_factor
            rollout_seed rollout_health_check_first_wait
        """,
    ),
    (
        "must be above 0 seconds",
        lambda value: value > 0,
        """
            placement_timeout trainer_start_timeout rollout_timeout train_timeout weight_sync_timeout
            rollout_request_timeout custom_generate_timeout rm_timeout engine_start_timeout
            rollout_health_check_interval rollout_health_check_timeout
        """,
    ),
    ("must be above 0", lambda value: value > 0, "distributed_timeout_minutes adam_eps tis_clip"),
    ("must be between 0 and 1", lambda value: 0 <= value <= 1, "gamma lambd"),
    (
        "must be at least 0 and below 1",
        lambda value: 0 <= value < 1,
        "adam_beta1 adam_beta2 sgd_momentum attention_dropout hidden_dropout",
    ),
    ("must be above 0 and at most 1", lambda value: 0 < value <= 1, "eval_top_p"),
    ("must be -1 (all) or at least 1", lambda value: value == -1 or value >= 1, "eval_top_k"),
    ("must be -1 (all at once) or at least 1", lambda value: value == -1 or value >= 1, "log_probs_chunk_size"),
    ("must be between 0 and 2147483647", lambda value: 0 <= value < 2**31, "seed"),
)

# Infinity means "no bound" for these flags.
_BOUNDS = frozenset(
    ("eps_clip", "eps_clip_high", "eps_clip_c", "value_clip", "tis_clip", "tis_threshold", "opsm_delta")
)

# Every count up to it is an exact float, and no count of a run is larger.
_LARGEST = 2**53


def _real(args: Namespace) -> Iterator[str]:
    """Given numbers are finite and small enough to be a count."""
    for name in sorted(args.given):
        values = vars(args).get(name)
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and name not in _BOUNDS)):
                yield f"{flag_of(name)} {value} must be a finite number."
            elif isinstance(value, int) and abs(value) > _LARGEST:
                yield f"{flag_of(name)} {value} must be a number below 2^53."


def _in_range(args: Namespace) -> Iterator[str]:
    for rule, holds, names in _RANGES:
        for name in names.split():
            value = vars(args)[name]
            # ``_real`` reports NaN.
            if isinstance(value, int | float) and not math.isnan(value) and not holds(value):
                yield f"{flag_of(name)} {value} {rule}."


Rule = Callable[[Namespace], Iterable[str]]

NUMBER_RULES: tuple[Rule, ...] = (_real, _in_range)

RULES: tuple[Rule, ...] = (
    overwritten_keys,
    *NUMBER_RULES,
    *cluster.RULES,
    *cluster.BATCH_RULES,
    *objective.GENERATION_RULES,
    *objective.OBJECTIVE_RULES,
    *paths.CHECKPOINT_RULES,
    *paths.RULES,
    *paths.OVERLAP_RULES,
)


def find_problems(args: Namespace, more_rules: Sequence[Rule] = ()) -> list[str]:
    """Every problem of ``args``, in the order of the rules, each once."""
    problems: list[str] = []
    for rule in (*RULES, *more_rules):
        try:
            problems += rule(args)
        except SlimeError as error:  # a rule may call functions of the run, which raise
            problems += error.problems
    # Two rules may find the same problem.
    return list(dict.fromkeys(problems))
