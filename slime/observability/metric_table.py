"""Every metric that slime logs: its meaning, its unit, and its reduction over tokens, samples and ranks.

The only list of metrics. To add one, add a row. ``docs/metrics.md`` is generated from the rows
(``tools/make_metrics_docs.py``), the board shows unit and meaning next to the curve, and tests fail if a run logs a
metric without a row. ``*`` in a name is the part that depends on the run: a data set, a reason, a category.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class MetricEntry:
    """One metric, or a family of them.

    Attributes:
        name: as logged, with its prefix. The prefix decides the step axis.
        meaning: one line.
        unit: empty for numbers without one.
        reduction: how the values of tokens, samples, micro-batches or ranks are put together.
        when: condition. Empty for always.
    """

    name: str
    meaning: str
    unit: str = ""
    reduction: str = ""
    when: str = ""


_M = MetricEntry
_PER_ROLLOUT = "mean over rollouts of each one's mean over trained tokens"
_SAMPLES = "mean over samples"
_COUNT = "count"
_STATS = "mean, median, max, min over samples"
_REQUESTS = "mean, median, max, min over requests"
_WALL = "wall clock"
_KL = "--use-kl-loss"
_TIS = "--use-tis or --get-mismatch-metrics"
_CUSTOM_TIS = "the example's --custom-tis-function-path"
_PD = "engines that separate prefill and decode"
_TURNS = "--log-multi-turn"

_TRAIN = (
    _M("train/loss", "what is differentiated", "", _PER_ROLLOUT),
    _M("train/pg_loss", "its policy-gradient part", "", _PER_ROLLOUT, "policy losses"),
    _M("train/entropy_loss", "entropy of the next-token distribution", "nats", _PER_ROLLOUT, "policy losses"),
    _M("train/pg_clipfrac", "tokens where the clipped branch decides", "share", _PER_ROLLOUT, "policy losses"),
    _M("train/ppo_kl", "old minus new log-prob; per sequence for gspo", "nats", _PER_ROLLOUT, "policy losses"),
    _M(
        "train/train_rollout_logprob_abs_diff",
        "distance of the trainer's and the engine's log-probs",
        "nats",
        _PER_ROLLOUT,
        "the engine's log-probs are known",
    ),
    _M("train/kl_loss", "KL from the reference, by --kl-loss-type", "nats", _PER_ROLLOUT, _KL),
    _M("train/ois", "new over old probability", "ratio", _PER_ROLLOUT, _TIS),
    _M("train/tis", "importance weight before truncation", "ratio", _PER_ROLLOUT, _TIS),
    _M("train/tis_clipfrac", "tokens whose weight was truncated", "share", _PER_ROLLOUT, _TIS),
    _M("train/tis_abs", "distance of the weight from 1", "ratio", _PER_ROLLOUT, _TIS),
    _M("train/mis_*", "what the example for engine mismatch reports", "", _PER_ROLLOUT, _CUSTOM_TIS),
    _M("train/tis_*", "weights of the long form", "", _PER_ROLLOUT, _CUSTOM_TIS),
    _M("train/rs_*", "rejection of tokens and sequences", "share", _PER_ROLLOUT, _CUSTOM_TIS),
    _M("train/is_ratio_*", "importance ratios", "ratio", _PER_ROLLOUT, _CUSTOM_TIS),
    _M("train/batch_norm_factor", "divisor of normalised weights", "ratio", _PER_ROLLOUT, _CUSTOM_TIS),
    _M("train/opsm_clipfrac", "sequences masked for being off-policy", "share", _PER_ROLLOUT, "--use-opsm"),
    _M("train/opd_reverse_kl", "student minus teacher log-prob", "nats", _PER_ROLLOUT, "--use-opd"),
    _M("train/grad_norm", "norm of the gradient before clipping; NaN where it was not finite", "", "all parameters"),
    _M("train/skipped_steps", "steps skipped: gradients were not finite, or no token is trained", "steps", "last"),
    _M("train/lr-pg_*", "learning rate of a parameter group", "", "last"),
    _M("train/global_batch_size", "rollouts in the step", "rollouts", "sum over ranks"),
    _M("train/mtp_loss", "loss of multi-token prediction", "nats", "mean over tokens", "--enable-mtp-training"),
    _M("train/mtp_*_loss", "the same of one depth", "nats", "mean over tokens", "--enable-mtp-training"),
    _M(
        "train/critic-*",
        "the critic's loss, value_loss, value_clipfrac, grad_norm, ...",
        "",
        _PER_ROLLOUT,
        "with a critic",
    ),
)

_ROLLOUT = (
    _M("rollout/response_len/*", "tokens with loss in a response", "tokens", _STATS),
    _M("rollout/truncated_ratio", "responses cut at their maximum length", "share", _SAMPLES),
    _M("rollout/repetition_frac", "responses whose end says the same again and again", "share", _SAMPLES),
    _M("rollout/zero_std/count_*", "prompts whose rewards are all equal, by that reward", "prompts", _COUNT, "not ppo"),
    _M("rollout/prefix_cache_hit_rate", "prompt tokens that the engine had in its cache", "share", "sum over sum"),
    _M("rollout/avg_cached_tokens_per_sample", "the same in tokens", "tokens", _SAMPLES),
    _M("rollout/spec_accept_rate", "draft tokens that were accepted", "share", _SAMPLES, "speculative decoding"),
    _M("rollout/spec_accept_length", "tokens per verification", "tokens", _SAMPLES, "speculative decoding"),
    _M("rollout/error_cat/*", "samples with that category", "share", _SAMPLES, "--log-reward-category"),
    _M("rollout/top_p_kept_vocab_per_token", "size of the nucleus", "entries", "mean over tokens", "a nucleus is kept"),
    _M("rollout/response_tokens", "all response tokens of the batch", "tokens", "sum"),
    _M(
        "rollout/masked_share",
        "response tokens without loss: tools, older weights, removed samples",
        "share",
        "sum over sum",
    ),
    _M("rollout/wasted_tokens", "dropped, discarded and stale tokens together", "tokens", "sum"),
    _M("rollout/dropped_tokens", "of groups that the dynamic filter rejected", "tokens", "sum", "some were"),
    _M("rollout/discarded_tokens", "of groups that came when the batch was full", "tokens", "sum", "some did"),
    _M("rollout/stale_tokens", "of groups that were older than --max-weight-staleness", "tokens", "sum", "fully-async"),
    _M("rollout/stale_groups", "such groups", "prompts", _COUNT, "fully-async"),
    _M("rollout/waiting_groups", "finished groups that wait for the next rollout", "prompts", _COUNT, "fully-async"),
    _M("rollout/dynamic_filter/drop_*", "groups rejected for that reason", "prompts", _COUNT, "a dynamic filter"),
    _M("rollout/dropped_groups", "groups rejected in all", "prompts", _COUNT, "a dynamic filter"),
    _M("rollout/left_over_groups", "groups that went back to the data source", "prompts", _COUNT, "over-sampling"),
    _M("rollout/left_over_tokens", "what they keep for the next rollout", "tokens", "sum", "--partial-rollout"),
    _M("rollout/dropped_samples", "samples of trailing rollouts that fill no step", "samples", _COUNT),
    _M(
        "rollout/unique_token_share",
        "tokens that pass the trained model, over those of the samples",
        "share",
        "sum over sum",
        "--share-prefixes",
    ),
    _M("rollout/failed_samples", "samples that were given up", "samples", _COUNT, "some were"),
    _M("rollout/failed_generations", "attempts that raised and were repeated", "attempts", _COUNT, "some did"),
    _M(
        "rollout/ungraded_answers",
        "answers whose grading was stopped; their reward is 0",
        "samples",
        _COUNT,
        "some were",
    ),
    _M("rollout/skipped_rows", "rows without anything to learn", "rows", _COUNT, "supervised data"),
    _M("rollout/weight_version_lag", "rollouts between the engines' weights and the newest", "rollouts", "last"),
    _M(
        "rollout/weight_version_lag/*", "the same of the oldest token of a sample", "rollouts", "mean, max over samples"
    ),
    _M(
        "rollout/correct_length/p*",
        "right responses in that quarter of the maximum length",
        "share",
        "right samples",
        "--log-correct-samples",
    ),
    _M(
        "rollout/correct_response_lengths",
        "length of right responses",
        "tokens",
        "right samples",
        "--log-correct-samples",
    ),
    _M("rollout/correct_entropy", "entropy in right responses", "nats", "right samples", "--log-correct-samples"),
    _M("rollout/raw_reward", "reward as the grader gave it", "", _SAMPLES),
    _M("rollout/source/*/raw_reward", "the same of one source of prompts", "", _SAMPLES, "several --prompt-data"),
    _M("rollout/rewards", "after group normalisation", "", _SAMPLES),
    _M("rollout/response_lengths", "response tokens", "tokens", _SAMPLES),
    _M("rollout/total_lengths", "prompt and response tokens", "tokens", _SAMPLES),
    _M("rollout/truncated", "truncated samples among those trained on", "share", _SAMPLES),
    _M("rollout/log_probs", "of the trainer before the step", "nats", _PER_ROLLOUT),
    _M("rollout/rollout_log_probs", "of the engine", "nats", _PER_ROLLOUT),
    _M("rollout/ref_log_probs", "of the reference", "nats", _PER_ROLLOUT, _KL),
    _M("rollout/teacher_log_probs", "of a teacher", "nats", _PER_ROLLOUT, "distillation"),
    _M("rollout/logprob_abs_diff_max", "largest distance of trainer and engine", "nats", "max over tokens"),
    _M("rollout/advantages", "credit per token", "", _PER_ROLLOUT),
    _M("rollout/returns", "target of a value function", "", _PER_ROLLOUT),
    _M("rollout/values", "estimate of the critic", "", _PER_ROLLOUT, "with a critic"),
    _M("rollout/kl", "KL from the reference inside the rewards", "nats", _PER_ROLLOUT),
    _M("rollout/entropy", "entropy before the step", "nats", _PER_ROLLOUT, "--use-rollout-entropy"),
    _M("rollout/opd_reverse_kl", "student minus teacher log-prob", "nats", _PER_ROLLOUT, "--use-opd"),
    _M("rollout/round_number", "turns of a conversation", "turns", _SAMPLES, "samples say so"),
    _M(
        "multi_turn/raw_response_length/*",
        "response with observations; clip_ratio: share at the maximum",
        "tokens",
        "mean, max, min over samples",
        _TURNS,
    ),
    _M(
        "multi_turn/wo_obs_response_length/*",
        "response without observations",
        "tokens",
        "mean, max, min over samples",
        _TURNS,
    ),
    _M("multi_turn/multi_turn_metric/*", "turns", "turns", "mean, max, min over samples", _TURNS),
    _M(
        "passrate/pass@*",
        "chance that one of k samples is right (Chen et al. 2021)",
        "share",
        "mean over prompts",
        "--log-passrate",
    ),
)

_EVAL = (
    _M("eval/weight_version", "rollouts that the answering weights were trained on", "rollouts", "min over samples"),
    _M("eval/*-truncated_ratio", "truncated responses of a set", "share", _SAMPLES),
    _M("eval/*-pass@*", "chance that one of k samples is right", "share", "mean over prompts", "--log-passrate"),
    _M("eval/*/*", "what rollout/ says, of an evaluation set", "", "as there"),
    _M("eval/*", "reward of a set", "", _SAMPLES),
)

_PERF = (
    _M("perf/rollout_time", "from the request for a rollout to its shards", "s", _WALL),
    _M(
        "perf/tail_time",
        "from the end of 95 % of the rollout's samples to that of the last one",
        "s",
        _WALL,
        "the default rollout",
    ),
    _M("perf/train_time", "training of a rollout, all ranks", "s", _WALL),
    _M("perf/train_wait_time", "from the end of one training to the begin of the next", "s", _WALL),
    _M("perf/step_time", "the two together", "s", _WALL),
    _M("perf/wait_time_ratio", "share of the step in which the trainer waits", "share", ""),
    _M("perf/update_weights_time", "from the pause of the engines to their continuation", "s", "source rank"),
    _M("perf/update_weights_bytes", "weights sent to each engine", "bytes", "sum"),
    _M("perf/update_weights_gb_per_s", "the same per second", "GB/s", ""),
    _M("perf/update_weights_density", "changed over all bytes of the weights", "share", "source rank", "delta sync"),
    _M("perf/update_weights_wire_bytes", "bytes written by a delta sync", "bytes", "sum", "delta sync"),
    _M("perf/save_model_time", "writing a checkpoint", "s", _WALL, "one is due"),
    _M("perf/first_step_time", "from the start of the command to the first trained step", "s", _WALL, "once"),
    _M(
        "perf/*_time",
        "a phase: log_probs, ref_log_probs, teacher_log_probs, actor_train, critic_train, sleep, ...",
        "s",
        "longest of the main rank",
    ),
    _M("perf/*_tflops", "floating-point operations of a pass, a backward pass counted as two", "TFLOP/s per rank", ""),
    _M("perf/actor_train_tok_per_s", "tokens trained on per second, all ranks", "tok/s", ""),
    _M("perf/non_generation_time/*", "seconds in tools and environments", "s", _STATS, "some were"),
    _M("perf/tokens_per_gpu_per_sec", "response tokens", "tok/s/GPU", "sum"),
    _M("perf/effective_tokens_per_gpu_per_sec", "response tokens with loss", "tok/s/GPU", "sum"),
    _M("perf/longest_sample_*", "the longest response, which every rollout waits for", "tok/s, s", "max"),
    _M("perf/longest_effective_sample_*", "the same, counting tokens with loss", "tok/s, s", "max"),
    _M("perf/request/count", "requests that ended", "requests", _COUNT),
    _M("perf/request/profiled_count", "those whose reply told its times", "requests", _COUNT),
    _M("perf/request/*", "e2e_latency and queue_time of a request", "s", _REQUESTS),
    _M("perf/decode/throughput/*", "of a request", "tok/s", _REQUESTS, "the engine says so"),
    _M("perf/decode/*", "phases of the decoding engine", "s", _REQUESTS, _PD),
    _M("perf/prefill/*", "phases of the prefilling engine; transfer in GB/s, MB, count", "s", _REQUESTS, _PD),
)

METRICS: tuple[MetricEntry, ...] = (*_TRAIN, *_ROLLOUT, *_EVAL, *_PERF)


def describe(name: str) -> MetricEntry | None:
    """The entry of a metric. None for metrics of users' functions."""
    # The exact name first: perf/rollout_time also matches perf/*_time.
    exact = (entry for entry in METRICS if entry.name == name)
    return next(exact, None) or next((entry for entry in METRICS if fnmatchcase(name, entry.name)), None)
