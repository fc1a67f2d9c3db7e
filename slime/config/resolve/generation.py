"""Lengths of prompts and responses, evaluation, reward keys."""

from __future__ import annotations

from argparse import Namespace

from slime.config import notices
from slime.models.config_json import read_model_config, text_part

__all__ = ["evaluation", "lengths", "reward_keys"]

_DEFAULT_RESPONSE_LEN = 1024


def lengths(args: Namespace) -> None:
    """B41, B42, D13: the context decides what is left open."""
    engine_limit = getattr(args, "sglang_context_length", None)
    if args.rollout_max_context_len is None and isinstance(engine_limit, int) and engine_limit > 1:
        args.rollout_max_context_len = engine_limit
        notices.info(args, "--rollout-max-context-len", f"{engine_limit}: the limit of the engines")
    context = args.rollout_max_context_len
    if args.rollout_max_response_len is None:
        args.rollout_max_response_len = _response_len(args, context)
        text = f"not given: {args.rollout_max_response_len} tokens"
        notices.warn(args, "--rollout-max-response-len", text)
    elif context is None and (model := _model_context(args.hf_checkpoint)) and args.rollout_max_response_len >= model:
        text = f"the model of --hf-checkpoint takes {model} tokens, prompt and response together"
        notices.warn(args, f"--rollout-max-response-len {args.rollout_max_response_len}", text)
    if context is not None and args.rollout_max_prompt_len is None:
        args.rollout_max_prompt_len = context - 1
    if args.eval_max_context_len is None:
        args.eval_max_context_len = context


def _response_len(args: Namespace, context: int | None) -> int:
    """What the context leaves after the longest prompt; without a context limit 1024, if the model can do that."""
    prompt = args.rollout_max_prompt_len
    if context is not None:  # without a prompt limit generation leaves each prompt its own rest
        return max(1, context - (prompt or 1))
    model = _model_context(args.hf_checkpoint)
    if model is None:
        return _DEFAULT_RESPONSE_LEN
    return max(1, min(_DEFAULT_RESPONSE_LEN, model - (prompt or model // 2)))


def _model_context(hf_checkpoint: str | None) -> int | None:
    """``max_position_embeddings`` of the model; None where it cannot be read, which the checks report."""
    value = text_part(read_model_config(hf_checkpoint)).get("max_position_embeddings")
    return value if isinstance(value, int) and value > 1 else None


def evaluation(args: Namespace) -> None:
    """B10, B33, D10."""
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.eval_config is not None and args.eval_prompt_data:
        notices.warn(args, "--eval-prompt-data", "ignored, because --eval-config decides")
        args.eval_prompt_data = None
    has_sets = args.eval_config is not None or bool(args.eval_prompt_data)
    if args.eval_interval is not None and args.eval_interval > 0 and not has_sets:
        text = "without --eval-prompt-data or --eval-config there is nothing to evaluate: evaluation is off"
        notices.warn(args, f"--eval-interval {args.eval_interval}", text)
        args.eval_interval = None
    if has_sets and args.eval_interval is None:
        notices.warn(args, "--eval-interval", "not given: the evaluation sets are never used")
    if args.eval_prompt_data and len(args.eval_prompt_data) == 1:
        notices.warn(args, "--eval-prompt-data", "a file without a name: the set is called aime")


def reward_keys(args: Namespace) -> None:
    """B20."""
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
