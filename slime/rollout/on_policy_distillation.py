"""On-policy distillation from a teacher server: its log-probs of the student's tokens are the signal.

The teacher is an SGLang server, or slime's own log-prob server (``docs/logprob_server.md``), which Megatron runs.

    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
    --rm-url http://teacher:port/generate --use-opd --opd-type sglang

The reward of a sample is the teacher's reply. The post-processing turns it into ``Sample.teacher_log_probs`` and sets
the reward to 0: the trainer's signal is the reverse KL between student and teacher (Agarwal et al. 2024,
arXiv:2306.13649). The teacher must have the student's tokenizer.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from slime.data.sample import Sample
from slime.rollout.base_types import complete_args
from slime.rollout.engine_request import prompt_fields
from slime.rollout.failures import is_given_up
from slime.utils.async_utils import call_in_thread
from slime.utils.errors import ConfigError, DataError
from slime.utils.http_utils import post

_RETRIES = 8


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """Return the teacher's reply with the log-probs of the sample's tokens. It generates nothing.

    Raises:
        ConfigError: no ``--rm-url``.
        EngineError, DeadlineExceeded: the teacher refused, or did not answer.
    """
    if not complete_args(args).rm_url:
        raise ConfigError("on-policy distillation needs --rm-url http://HOST:PORT/generate of the teacher's server")
    # In a thread: encoding images is slow.
    prompt = await call_in_thread(prompt_fields, args.hf_checkpoint, sample, sample.tokens)
    payload = {
        **prompt,
        "sampling_params": {"temperature": args.rollout_temperature, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        # From the first token: the default of the server is the generated tokens only.
        "logprob_start_len": 0,
    }
    reply = await post(args.rm_url, payload, max_retries=_RETRIES, timeout_s=args.rm_timeout)
    _log_probs(reply, sample)  # raises now, with the index of the sample, if the reply is unusable
    result: dict[str, Any] = reply
    return result


def post_process_rewards(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """Fill ``teacher_log_probs`` (fp32 ``[R]``) from the teacher's replies. Returns zeros as raw and final rewards."""
    for sample in samples:
        if not is_given_up(sample):  # such a sample has no reply and no part in training
            sample.teacher_log_probs = _log_probs(sample.reward, sample)
    zeros = [0.0] * len(samples)
    return zeros, list(zeros)


def _log_probs(reply: Any, sample: Sample) -> torch.Tensor:
    values = _of_all_tokens(reply)
    if values is None:
        raise DataError(
            f"--rm-url: the teacher's reply for sample {sample.index} has neither meta_info.input_token_logprobs nor "
            "log_probs: is it the /generate of an SGLang server, or of slime's log-prob server?"
        )
    if len(values) + 1 != len(sample.tokens):  # the first token has no context, hence no log-prob
        raise DataError(
            f"--rm-url: the teacher scored {len(values) + 1} tokens of sample {sample.index}, which has "
            f"{len(sample.tokens)}."
        )
    response = values[len(values) - sample.response_length :]
    if any(value is None for value in response):
        raise DataError(f"--rm-url: the teacher gave no log-prob for some response tokens of sample {sample.index}.")
    return torch.tensor(response, dtype=torch.float32)


def _of_all_tokens(reply: Any) -> list[float | None] | None:
    """Log-probs of all tokens but the first, in the format of either server; None for anything else."""
    if not isinstance(reply, dict):
        return None
    if isinstance(reply.get("log_probs"), list):
        values: list[float | None] = reply["log_probs"]
        return values
    meta = reply.get("meta_info")
    rows = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    # The first row belongs to the first token and has no log-prob.
    return [row[0] for row in rows[1:]] if rows else None
