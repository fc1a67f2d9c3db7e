"""Rules of prompts, lengths, sampling and dumps, and of the algorithm with flags that cannot be combined with it."""

from __future__ import annotations

import os
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.algorithms import find_estimator
from slime.config import groups
from slime.models.config_json import load_model_config


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
        groups.warn(args, "--use-stateless-adam", text)
    if args.use_stateless_adam and args.save is not None and not args.fp32:
        groups.warn(args, "--use-stateless-adam", "a resumed run has 16-bit weights, whose fp32 copies are not saved")


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


OBJECTIVE_RULES = (_estimator, _clipping, _importance_sampling, _distillation, _on_policy, _optimizer, _weights_in_fp8)


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
        groups.warn(args, f"--rollout-temperature {args.rollout_temperature:g}", text)
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        groups.warn(args, "--mask-offpolicy-in-partial-rollout", "no effect without --partial-rollout")


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
        groups.warn(args, flag, "the teacher's log-probs are those of its whole vocabulary, the student's of the cut")


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


GENERATION_RULES = (_model, _prompts, _lengths, _sampling, _dumps)
