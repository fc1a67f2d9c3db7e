"""Prompts, lengths, sampling, dumps."""

from __future__ import annotations

import os
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.config import notices
from slime.models.config_json import load_model_config

MEDIA = ("audio", "image", "video")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_DEFAULT_MOST_IDS = 4096  # of SGLang's --sampling-mask-max-tokens


def _model(args: Namespace) -> Iterator[str]:
    if args.hf_checkpoint is None:
        yield "--hf-checkpoint is required: the Hugging Face directory of the model to train."
    elif not (Path(args.hf_checkpoint) / "config.json").is_file():
        if Path(args.hf_checkpoint).is_dir():
            yield f"--hf-checkpoint {args.hf_checkpoint}: there is no config.json in that directory."
        else:
            download = how_to_download(args.hf_checkpoint)
            yield f"--hf-checkpoint {args.hf_checkpoint}: there is no such directory. {download}"
    else:
        load_model_config(args.hf_checkpoint)  # raises ConfigError for a bad file


def how_to_download(directory: str) -> str:
    """A sentence with the command that puts a model of the Hugging Face Hub into ``directory``."""
    name = os.path.relpath(directory)  # ORG/NAME, made absolute by an earlier step
    model = name if _HUB_NAME.fullmatch(name) else "ORG/NAME"
    target = name if model == name else directory
    return f"To download a model of the Hugging Face Hub: hf download {model} --local-dir {shlex.quote(target)}"


def _prompts(args: Namespace) -> Iterator[str]:
    if args.rollout_global_dataset and args.load_debug_rollout_data is None and args.prompt_data is None:
        yield "--prompt-data is required: the .jsonl or .parquet file with the prompts."
    if not args.input_key:
        yield "--input-key must not be empty: the field of a row that holds the prompt."
    for kind in args.multimodal_keys or {}:
        if kind not in MEDIA:
            yield f"--multimodal-keys: {kind!r} is not a kind of media; use {', '.join(MEDIA)}."
    if args.background_eval and args.colocate:
        yield "--background-eval needs engines of their own: with --colocate they sleep while the trainer works."
    if not 0 <= args.max_failed_share <= 1:
        yield f"--max-failed-share {args.max_failed_share} must be between 0 and 1: a share of the samples."


def _lengths(args: Namespace) -> Iterator[str]:
    context, prompt, limit = args.rollout_max_context_len, args.rollout_max_prompt_len, args.sglang_context_length
    if isinstance(limit, int) and limit < 2:
        yield f"--sglang-context-length {limit} must be at least 2: a token of the prompt and one of the response."
    elif isinstance(limit, int) and context is not None and context > limit:
        yield f"--rollout-max-context-len {context} is more than the engines accept, --sglang-context-length {limit}."
    if context is not None and prompt is not None and prompt > context - 1:
        yield f"--rollout-max-prompt-len {prompt} must be below --rollout-max-context-len {context}."


def _sampling(args: Namespace) -> Iterator[str]:
    if args.rollout_temperature <= 0:
        yield f"--rollout-temperature {args.rollout_temperature} must be above 0: training needs sampled responses."
    if args.eval_temperature is not None and args.eval_temperature < 0:
        yield f"--eval-temperature {args.eval_temperature} must not be negative; 0 is greedy."
    if not 0 < args.rollout_top_p <= 1:
        yield f"--rollout-top-p {args.rollout_top_p} must be above 0 and at most 1."
    yield from _sampling_sets(args)
    if args.use_opd and args.opd_type == "sglang" and args.rollout_temperature != 1:
        text = "SGLang scores prompts at temperature 1, the student's log-probs are those of this temperature: only "
        text += "slime's log-prob server (docs/logprob_server.md) is a teacher at it"
        notices.warn(args, f"--rollout-temperature {args.rollout_temperature:g}", text)
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        notices.warn(args, "--mask-offpolicy-in-partial-rollout", "no effect without --partial-rollout")


def _sampling_sets(args: Namespace) -> Iterator[str]:
    """The trainer replays a cut vocabulary from the ids that engines return, so engines must return all of them."""
    most = args.sglang_sampling_mask_max_tokens
    if args.rollout_top_k != -1 and not 1 < args.rollout_top_k <= most:
        yield (
            f"--rollout-top-k {args.rollout_top_k} must be -1 (all) or from 2 to {most}, the ids per token that "
            "engines return for the trainer to replay: raise --sglang-sampling-mask-max-tokens."
        )
    if args.rollout_top_p == 1.0 and args.rollout_top_k == -1:
        return
    flag = "--rollout-top-p" if args.rollout_top_p != 1.0 else "--rollout-top-k"
    if args.rollout_top_k == -1 and most < _DEFAULT_MOST_IDS:
        yield (
            f"--sglang-sampling-mask-max-tokens {most} must be {_DEFAULT_MOST_IDS} or more with --rollout-top-p and "
            "without --rollout-top-k."
        )
    algorithm = args.sglang_speculative_algorithm
    if algorithm is not None and "DFLASH" not in algorithm.upper():
        yield (
            f"{flag} and --sglang-speculative-algorithm {algorithm} exclude each other: SGLang does not return the ids "
            "that drafted tokens were sampled from, which the trainer needs."
        )
    if args.use_opd and args.opd_type == "sglang":
        notices.warn(args, flag, "the teacher's log-probs are those of its whole vocabulary, the student's of the cut")


def _dumps(args: Namespace) -> Iterator[str]:
    subsample = args.load_debug_rollout_data_subsample
    if subsample is not None and not 0 < subsample <= 1:
        yield f"--load-debug-rollout-data-subsample {subsample} is a share: above 0, at most 1."
    sections = [target for target in args.profile_target if target != "train_overall"]
    # A process can have one torch profiler at a time.
    if args.use_pytorch_profiler and sections and "train_overall" in args.profile_target:
        yield f"--profile-target train_overall {' '.join(sections)}: a process has one profiler at a time, name either."
    if not 0 <= args.profile_step_start < args.profile_step_end:
        yield (
            f"--profile-step-start {args.profile_step_start} --profile-step-end {args.profile_step_end}: the rollouts "
            "from start up to, not including, end are profiled, so 0 <= start < end."
        )
    if args.record_samples < 0:
        yield f"--record-samples {args.record_samples} must be 0 or more."
    if args.memory_recorder == "memray" and args.memory_snapshot_num_steps is None:
        yield "--memory-recorder memray needs --memory-snapshot-num-steps N."


RULES = (_model, _prompts, _lengths, _sampling, _dumps)
