"""Flags about generation, rewards, filters and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"


@dataclass(frozen=True)
class GenerationArgs:
    """Rollout generation."""

    hf_checkpoint: str | None = field(
        default=None, metadata={"help": "Hugging Face directory of the model: tokenizer, config, first weights."}
    )
    rollout_function_path: str = field(
        default=DEFAULT_ROLLOUT_FUNCTION,
        metadata={"help": "Function that makes a batch: f(args, rollout_id, data_source, evaluation=False)."},
    )
    custom_generate_function_path: str | None = field(
        default=None, metadata={"help": "Function that generates one sample: f(args, sample, sampling_params)."}
    )
    rollout_temperature: float = field(
        default=1.0, metadata={"help": "Sampling temperature; the trainer divides its logits by it too."}
    )
    rollout_top_p: float = field(
        default=1.0, metadata={"help": "Nucleus of sampling; the trainer takes the engine's cut."}
    )
    rollout_top_k: int = field(
        default=-1, metadata={"help": "Top-k of sampling, -1 is off; the trainer takes the engine's cut."}
    )
    rollout_max_response_len: int | None = field(default=None, metadata={"help": "Most new tokens of a response."})
    rollout_max_prompt_len: int | None = field(
        default=None, metadata={"help": "Drop prompts with more tokens. Default: --rollout-max-context-len minus 1."}
    )
    rollout_max_context_len: int | None = field(
        default=None, metadata={"help": "Most tokens of prompt and response together."}
    )
    rollout_stop: list[str] | None = field(default=None, metadata={"help": "Strings that end a response."})
    rollout_stop_token_ids: list[int] | None = field(default=None, metadata={"help": "Token ids that end a response."})
    rollout_skip_special_tokens: bool = field(
        default=False, metadata={"help": "Leave special tokens out of the decoded response text."}
    )
    keep_stop_token_text: bool = field(
        default=False,
        metadata={"help": "sample.response ends with the text of the stop token (<|im_end|>), as in upstream slime."},
    )
    partial_rollout: bool = field(
        default=False,
        metadata={"help": "Responses cut off at the end of a rollout are kept and continued by the next one."},
    )
    mask_offpolicy_in_partial_rollout: bool = field(
        default=False, metadata={"help": "Do not train on the part of a response that an earlier rollout generated."}
    )
    rollout_longest_first: bool = field(
        default=False,
        metadata={
            "help": "Generate the prompts with the longest responses of the last epoch first: a long response that "
            "begins last holds up all engines."
        },
    )
    max_weight_staleness: int | None = field(
        default=None,
        metadata={
            "help": "Largest age, in rollouts, of the weights that began a response. train_async.py makes no more "
            "rollouts ahead than that. 0 gives the results of train.py."
        },
    )
    replay_schedule: str | None = field(
        default=None,
        metadata={
            "metavar": "FILE",
            "help": "For slime.rollout.scheduled_rollout: the schedule.jsonl whose batches are generated again.",
        },
    )
    rollout_request_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds one generation request may take, with retries and its wait in the engine's queue. The "
            "sample of a longer one fails (--max-failed-share), which biases training toward short answers. Default: "
            "no limit but --rollout-timeout."
        },
    )
    custom_generate_timeout: float = field(
        default=7200.0,
        metadata={
            "help": "Seconds one call of a custom generate function may take, with all its turns and tools; then it "
            "counts as raised (--max-sample-retries)."
        },
    )
    max_sample_retries: int = field(
        default=2, metadata={"help": "How often a sample whose generation raised is tried again before it is given up."}
    )
    max_failed_share: float = field(
        default=0.1,
        metadata={
            "help": "Share of a rollout's or an evaluation's samples that may fail for good, in generation or reward; "
            "they are left out of the training. More of them end the run."
        },
    )
    max_turns: int | None = field(
        default=None, metadata={"help": "Turn limit for custom multi-turn generate functions, which read it from args."}
    )


@dataclass(frozen=True)
class RewardModelArgs:
    """Rewards."""

    rm_type: str | None = field(
        default=None,
        metadata={"help": "Built-in reward by name (math, dapo, gpqa, ...); the prefix boxed_ unboxes first."},
    )
    custom_rm_path: str | None = field(
        default=None,
        metadata={"help": "Reward function f(args, sample), sync or async, or a class; overrides --rm-type."},
    )
    rm_url: str | None = field(default=None, metadata={"help": "Address of the service for --rm-type remote_rm."})
    group_rm: bool = field(default=False, metadata={"help": "Score all samples of a prompt in one call."})
    rm_timeout: float = field(default=60.0, metadata={"help": "Seconds one reward call may take."})
    reward_key: str | None = field(default=None, metadata={"help": "Key of the reward inside reward dicts."})
    eval_reward_key: str | None = field(
        default=None, metadata={"help": "The same for evaluation. Default: --reward-key."}
    )
    custom_reward_post_process_path: str | None = field(
        default=None, metadata={"help": "Replaces reward normalization: f(args, samples) -> (raw, rewards)."}
    )
    custom_convert_samples_to_train_data_path: str | None = field(
        default=None, metadata={"help": "Replaces the conversion to training columns: f(args, samples) -> dict."}
    )


@dataclass(frozen=True)
class FilterArgs:
    """Filters and hooks around a rollout."""

    dynamic_sampling_filter_path: str | None = field(
        default=None, metadata={"help": "Keeps or drops a finished group: f(args, samples) -> bool."}
    )
    rollout_sample_hook_path: list[str] = field(
        default_factory=list,
        metadata={"help": "Called on every sample before its reward; repeatable.", "append": True},
    )
    rollout_sample_filter_path: str | None = field(
        default=None, metadata={"help": "Marks samples to leave out of the loss: f(args, groups)."}
    )
    rollout_all_samples_process_path: str | None = field(
        default=None, metadata={"help": "Sees all finished groups, dropped ones too: f(args, groups, data_source)."}
    )


@dataclass(frozen=True)
class EvalArgs:
    """Evaluation."""

    eval_function_path: str | None = field(
        default=None, metadata={"help": "Evaluation function. Default: --rollout-function-path."}
    )
    eval_interval: int | None = field(default=None, metadata={"help": "Evaluate every N rollouts."})
    eval_prompt_data: list[str] | None = field(
        default=None,
        metadata={"help": "Pairs NAME FILE of evaluation sets; repeatable.", "append": True},
    )
    eval_config: str | None = field(
        default=None,
        metadata={
            "metavar": "FILE",
            "help": "YAML or JSON file with evaluation sets and their settings; beats --eval-prompt-data.",
        },
    )
    background_eval: bool = field(
        default=False,
        metadata={
            "help": "Evaluate beside the next rollouts and training instead of before them; new weights wait until the "
            "evaluation is through. Not with --colocate."
        },
    )
    skip_eval_before_train: bool = field(default=False, metadata={"help": "No evaluation before the first rollout."})
    n_samples_per_eval_prompt: int = field(default=1, metadata={"help": "Responses per evaluation prompt."})
    eval_temperature: float | None = field(
        default=None, metadata={"help": "Temperature; 0 is greedy. Default: --rollout-temperature."}
    )
    eval_top_p: float | None = field(default=None, metadata={"help": "Nucleus. Default: --rollout-top-p."})
    eval_top_k: int | None = field(default=None, metadata={"help": "Top-k. Default: --rollout-top-k."})
    eval_max_response_len: int | None = field(
        default=None, metadata={"help": "Most new tokens. Default: --rollout-max-response-len."}
    )
    eval_max_prompt_len: int | None = field(default=None, metadata={"help": "Drop prompts with more tokens."})
    eval_max_context_len: int | None = field(
        default=None, metadata={"help": "Most tokens of prompt and response. Default: --rollout-max-context-len."}
    )
    eval_min_new_tokens: int | None = field(default=None, metadata={"help": "Least new tokens."})
    eval_input_key: str | None = field(default=None, metadata={"help": "Prompt field. Default: --input-key."})
    eval_label_key: str | None = field(default=None, metadata={"help": "Label field. Default: --label-key."})
    eval_tool_key: str | None = field(default=None, metadata={"help": "Tools field. Default: --tool-key."})


@dataclass(frozen=True)
class RolloutBufferArgs:
    """Rollout buffer service (slime_plugins/rollout_buffer)."""

    rollout_buffer_url: str | None = field(
        default=None,
        metadata={"help": "Address of the service that collects trajectories; its rollout function reads them there."},
    )
    fetch_trajectory_retry_times: int = field(
        default=-1,
        metadata={
            "help": "How often a request to the service is sent again when it does not answer; -1 until "
            "--rollout-request-timeout, else --rollout-timeout."
        },
    )
    rollout_task_type: str = field(
        default="math", metadata={"help": "Name of the task whose generator the service runs."}
    )
    min_batch_collection_ratio: float = field(
        default=1,
        metadata={
            "help": "Share of a batch that is enough to train on.",
            "no_effect": "nothing reads it: a rollout always has --rollout-batch-size groups",
        },
    )
