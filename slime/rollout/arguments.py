"""Flags about generation, rewards, filters and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.utils.misc import flag

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"


@dataclass(frozen=True)
class GenerationArgs:
    """Rollout generation."""

    hf_checkpoint: str | None = flag(None, "Hugging Face directory of the model: tokenizer, config, first weights.")
    rollout_function_path: str = flag(
        DEFAULT_ROLLOUT_FUNCTION, "Function that makes a batch: f(args, rollout_id, data_source, evaluation=False)."
    )
    custom_generate_function_path: str | None = flag(
        None, "Function that generates one sample: f(args, sample, sampling_params)."
    )
    rollout_temperature: float = flag(1.0, "Sampling temperature; the trainer divides its logits by it too.")
    rollout_top_p: float = flag(1.0, "Nucleus of sampling; the trainer takes the engine's cut.")
    rollout_top_k: int = flag(-1, "Top-k of sampling, -1 is off; the trainer takes the engine's cut.")
    rollout_max_response_len: int | None = flag(None, "Most new tokens of a response.")
    rollout_max_prompt_len: int | None = flag(
        None, "Drop prompts with more tokens. Default: --rollout-max-context-len minus 1."
    )
    rollout_max_context_len: int | None = flag(None, "Most tokens of prompt and response together.")
    rollout_stop: list[str] | None = flag(None, "Strings that end a response.")
    rollout_stop_token_ids: list[int] | None = flag(None, "Token ids that end a response.")
    rollout_skip_special_tokens: bool = flag(False, "Leave special tokens out of the decoded response text.")
    keep_stop_token_text: bool = flag(
        False, "sample.response ends with the text of the stop token (<|im_end|>), as in upstream slime."
    )
    partial_rollout: bool = flag(
        False, "Responses cut off at the end of a rollout are kept and continued by the next one."
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "Do not train on the part of a response that an earlier rollout generated."
    )
    rollout_longest_first: bool = flag(
        False,
        "Generate the prompts with the longest responses of the last epoch first: a long response that "
        "begins last holds up all engines.",
    )
    max_weight_staleness: int | None = flag(
        None,
        "Largest age, in rollouts, of the weights that began a response. train_async.py makes no more "
        "rollouts ahead than that. 0 gives the results of train.py.",
    )
    replay_schedule: str | None = flag(
        None,
        "For slime.rollout.scheduled_rollout: the schedule.jsonl whose batches are generated again.",
        metavar="FILE",
    )
    rollout_request_timeout: float | None = flag(
        None,
        "Seconds one generation request may take, with retries and its wait in the engine's queue. The "
        "sample of a longer one fails (--max-failed-share), which biases training toward short answers. Default: "
        "no limit but --rollout-timeout.",
    )
    custom_generate_timeout: float = flag(
        7200.0,
        "Seconds one call of a custom generate function may take, with all its turns and tools; then it "
        "counts as raised (--max-sample-retries).",
    )
    max_sample_retries: int = flag(
        2, "How often a sample whose generation raised is tried again before it is given up."
    )
    max_failed_share: float = flag(
        0.1,
        "Share of a rollout's or an evaluation's samples that may fail for good, in generation or reward; "
        "they are left out of the training. More of them end the run.",
    )
    max_turns: int | None = flag(None, "Turn limit for custom multi-turn generate functions, which read it from args.")


@dataclass(frozen=True)
class RewardModelArgs:
    """Rewards."""

    rm_type: str | None = flag(
        None, "Built-in reward by name (math, dapo, gpqa, ...); the prefix boxed_ unboxes first."
    )
    custom_rm_path: str | None = flag(
        None, "Reward function f(args, sample), sync or async, or a class; overrides --rm-type."
    )
    rm_url: str | None = flag(None, "Address of the service for --rm-type remote_rm.")
    group_rm: bool = flag(False, "Score all samples of a prompt in one call.")
    rm_timeout: float = flag(60.0, "Seconds one reward call may take.")
    reward_key: str | None = flag(None, "Key of the reward inside reward dicts.")
    eval_reward_key: str | None = flag(None, "The same for evaluation. Default: --reward-key.")
    custom_reward_post_process_path: str | None = flag(
        None, "Replaces reward normalization: f(args, samples) -> (raw, rewards)."
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "Replaces the conversion to training columns: f(args, samples) -> dict."
    )

    @property
    def keys(self) -> list[str]:
        """The entries of reward dicts that are read. Empty if rewards are numbers."""
        return [key for key in (self.reward_key, self.eval_reward_key) if key]


@dataclass(frozen=True)
class FilterArgs:
    """Filters and hooks around a rollout."""

    dynamic_sampling_filter_path: str | None = flag(None, "Keeps or drops a finished group: f(args, samples) -> bool.")
    rollout_sample_hook_path: list[str] = field(
        default_factory=list, metadata={"help": "Called on every sample before its reward; repeatable.", "append": True}
    )
    rollout_sample_filter_path: str | None = flag(None, "Marks samples to leave out of the loss: f(args, groups).")
    rollout_all_samples_process_path: str | None = flag(
        None, "Sees all finished groups, dropped ones too: f(args, groups, data_source)."
    )


@dataclass(frozen=True)
class EvalArgs:
    """Evaluation."""

    eval_function_path: str | None = flag(None, "Evaluation function. Default: --rollout-function-path.")
    eval_interval: int | None = flag(None, "Evaluate every N rollouts.")
    eval_prompt_data: list[str] | None = flag(None, "Pairs NAME FILE of evaluation sets; repeatable.", append=True)
    eval_config: str | None = flag(
        None, "YAML or JSON file with evaluation sets and their settings; beats --eval-prompt-data.", metavar="FILE"
    )
    background_eval: bool = flag(
        False,
        "Evaluate beside the next rollouts and training instead of before them; new weights wait until the "
        "evaluation is through. Not with --colocate.",
    )
    skip_eval_before_train: bool = flag(False, "No evaluation before the first rollout.")
    n_samples_per_eval_prompt: int = flag(1, "Responses per evaluation prompt.")
    eval_temperature: float | None = flag(None, "Temperature; 0 is greedy. Default: --rollout-temperature.")
    eval_top_p: float | None = flag(None, "Nucleus. Default: --rollout-top-p.")
    eval_top_k: int | None = flag(None, "Top-k. Default: --rollout-top-k.")
    eval_max_response_len: int | None = flag(None, "Most new tokens. Default: --rollout-max-response-len.")
    eval_max_prompt_len: int | None = flag(None, "Drop prompts with more tokens.")
    eval_max_context_len: int | None = flag(
        None, "Most tokens of prompt and response. Default: --rollout-max-context-len."
    )
    eval_min_new_tokens: int | None = flag(None, "Least new tokens.")
    eval_input_key: str | None = flag(None, "Prompt field. Default: --input-key.")
    eval_label_key: str | None = flag(None, "Label field. Default: --label-key.")
    eval_tool_key: str | None = flag(None, "Tools field. Default: --tool-key.")


@dataclass(frozen=True)
class RolloutBufferArgs:
    """Rollout buffer service (slime_plugins/rollout_buffer)."""

    rollout_buffer_url: str | None = flag(
        None, "Address of the service that collects trajectories; its rollout function reads them there."
    )
    fetch_trajectory_retry_times: int = flag(
        -1,
        "How often a request to the service is sent again when it does not answer; -1 until "
        "--rollout-request-timeout, else --rollout-timeout.",
    )
    rollout_task_type: str = flag("math", "Name of the task whose generator the service runs.")
    min_batch_collection_ratio: float = flag(
        1,
        "Share of a batch that is enough to train on.",
        no_effect="nothing reads it: a rollout always has --rollout-batch-size groups",
    )
