"""Flags about prompt data, batch sizes and the length of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from slime.utils.misc import flag


@dataclass(frozen=True)
class PromptDataArgs:
    """Prompt data."""

    prompt_data: str | None = flag(
        None,
        "Training prompts: a .jsonl or .parquet file, a folder of the package datasets, or ORG/NAME of the "
        "Hub, each optionally with @[a:b], a slice of its rows. Several sources: NAME=SOURCE:WEIGHT ...",
        joins_words=True,
        metavar="SOURCE",
    )
    input_key: str = flag(
        "input", "Row field with the prompt: text or a list of messages. Rows without it may use 'prompt'."
    )
    label_key: str | None = flag(None, "Row field with the ground truth. Default: 'label' if rows have it.")
    metadata_key: str = flag("metadata", "Row field with a metadata object, or the JSON text of one.")
    tool_key: str | None = flag("tools", "Row field with the tool definitions given to the chat template.")
    apply_chat_template: bool = flag(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "JSON object of further arguments of the chat template."}
    )
    multimodal_keys: dict[str, Any] | None = flag(
        None,
        "JSON object: kind of media (image, video, audio) to the row field that holds it. Builds the "
        "vision tower in the trainer.",
    )
    skip_bad_lines: bool = flag(False, "Lines of a prompt file that are not JSON are left out instead of an error.")
    special_tokens_as_text: bool = flag(
        False,
        "Special tokens (<|im_end|>) in the text of a message are encoded as text, not as control tokens. "
        "With --apply-chat-template.",
    )
    num_data_workers: int = flag(
        0, "Processes that render and measure prompts ahead of their use; 0: the process that uses them does."
    )
    streaming_data: bool = flag(
        False,
        "Read the prompt file while training instead of loading it; --rollout-shuffle then mixes rows "
        "within 10000 of each other. Needs --num-rollout.",
    )
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen", "generic"] = flag(
        "qwen", "How supervised training finds the assistant's tokens; generic fits most other templates."
    )
    strict_resume: bool = flag(
        False, "A resumed run whose checkpoint has no data state is an error instead of a warning."
    )
    accept_changed_data: bool = flag(
        False,
        "Resume although the prompt data, or a flag that decides their order, changed since the "
        "checkpoint. Prompts continue at the saved row of the new order.",
    )
    rollout_global_dataset: bool = flag(
        True, "Load no prompt file; the rollout function makes its own prompts.", off="--disable-rollout-global-dataset"
    )
    rollout_shuffle: bool = flag(False, "Shuffle the prompts in every epoch.")
    rollout_seed: int = flag(42, "Seed of the shuffle and of deterministic sampling.")
    data_source_path: str = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", "Class that hands out prompts and takes groups back."
    )
    buffer_filter_path: str | None = flag(
        None, "Function that chooses buffered groups: f(args, rollout_id, buffer, num_samples)."
    )


@dataclass(frozen=True)
class BatchSizeArgs:
    """Batch sizes."""

    rollout_batch_size: int | None = flag(None, "Prompts per rollout.")
    n_samples_per_prompt: int | None = flag(
        None,
        "Responses per prompt. Default: 1; for group-relative advantages (grpo, gspo, cispo, "
        "reinforce_plus_plus_baseline) --global-batch-size x --num-steps-per-rollout / --rollout-batch-size where "
        "that is a whole number of at least 2, else 8.",
    )
    global_batch_size: int | None = flag(None, "Responses per optimizer step.")
    num_steps_per_rollout: int | None = flag(None, "Optimizer steps per rollout; decides the global batch size.")
    over_sampling_batch_size: int | None = flag(
        None, "Prompts requested at a time while groups are missing. Default: --rollout-batch-size."
    )


@dataclass(frozen=True)
class RunLengthArgs:
    """Length of the run."""

    num_rollout: int | None = flag(None, "Rollouts of the whole run; 0 only evaluates. Overrides --num-epoch.")
    num_epoch: int | None = flag(None, "Passes over the prompts.")
    start_rollout_id: int | None = flag(None, "First rollout. Default: the one after the checkpoint, or 0.")
