"""``--rm-type remote_rm``: a service at ``--rm-url`` that receives prompt, response and label."""

from __future__ import annotations

from typing import Any

from slime.data.sample import Sample
from slime.rollout.settings import setting
from slime.utils.errors import DataError, RequestRefused, ScoringError
from slime.utils.http_utils import post

__all__ = ["remote_rm"]

_TIMEOUT_S = 120.0
"""Unless ``--rm-timeout`` is longer."""


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """The JSON that the service answers: a number or a dict. Connection errors and 5xx are retried.

    Raises:
        ScoringError: the service refused this sample (4xx).
        EngineError, DeadlineExceeded: it does not answer, which concerns every sample.
    """
    if not args.rm_url:
        raise DataError("--rm-type remote_rm needs --rm-url, the address of the service")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    try:
        timeout_s = max(_TIMEOUT_S, setting(args, "rm_timeout"))
        return await post(args.rm_url, payload, max_retries=max_retries, timeout_s=timeout_s)
    except RequestRefused as error:
        raise ScoringError(f"--rm-type remote_rm on sample {sample.index}: {error}") from error
