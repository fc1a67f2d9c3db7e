"""On-policy distillation from a teacher that is served by SGLang: its log-probs of the student's own tokens.

    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
    --rm-url http://teacher:port/generate --use-opd --opd-type sglang

The reward of a sample is the teacher's reply; the post-processing turns it into ``Sample.teacher_log_probs`` and leaves
no reward: the trainer's signal is the reverse KL between student and teacher (Agarwal et al. 2024, arXiv:2306.13649).
The teacher must have the student's tokenizer.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from slime.data.sample import Sample
from slime.rollout.settings import setting
from slime.utils.errors import ConfigError, DataError
from slime.utils.http_utils import post

__all__ = ["post_process_rewards", "reward_func"]

_RETRIES = 8


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """Ask the teacher for the log-probs of the sample's tokens; nothing is generated. Returns its reply.

    Raises:
        ConfigError: no ``--rm-url``.
        EngineError, DeadlineExceeded: the teacher refused, or did not answer.
    """
    if not setting(args, "rm_url"):
        raise ConfigError(
            "on-policy distillation needs --rm-url http://HOST:PORT/generate of the teacher's SGLang server"
        )
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {
            "temperature": setting(args, "rollout_temperature"),
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    reply = await post(args.rm_url, payload, max_retries=_RETRIES, timeout_s=setting(args, "rm_timeout"))
    _log_probs(reply, sample)  # a reply that cannot be used is an error now, with the sample's name
    result: dict[str, Any] = reply
    return result


def post_process_rewards(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """Fill ``teacher_log_probs`` (fp32 ``[R]``) from the teacher's replies. Returns zeros as raw and final rewards."""
    for sample in samples:
        sample.teacher_log_probs = _log_probs(sample.reward, sample)
    zeros = [0.0] * len(samples)
    return zeros, list(zeros)


def _log_probs(reply: Any, sample: Sample) -> torch.Tensor:
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    rows = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not rows:
        raise DataError(
            f"--rm-url: the teacher's reply for sample {sample.index} has no meta_info.input_token_logprobs: is it an "
            "SGLang server's /generate?"
        )
    if len(rows) != len(sample.tokens):
        raise DataError(
            f"--rm-url: the teacher scored {len(rows)} tokens of sample {sample.index}, which has {len(sample.tokens)}."
        )
    values = [row[0] for row in rows[1:]]  # the first token has no context, hence no log-prob
    response = values[len(values) - sample.response_length :]
    if any(value is None for value in response):
        raise DataError(f"--rm-url: the teacher gave no log-prob for some response tokens of sample {sample.index}.")
    return torch.tensor(response, dtype=torch.float32)
