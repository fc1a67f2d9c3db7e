"""The generation request of one sample. Built here once, whoever sends it: whole or as a stream."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from slime.data.sample import Sample
from slime.rollout.sampling import check_token_ids, response_room

__all__ = ["EngineRequest", "build_request"]


@dataclass(frozen=True)
class EngineRequest:
    """Ready to be sent, once or again."""

    url: str
    payload: dict[str, Any]
    headers: dict[str, str] | None

    def new_attempt(self) -> dict[str, Any]:
        """The payload with an id of its own: an attempt that got lost may still be running under its id."""
        return self.payload | {"rid": uuid4().hex}


def build_request(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], ids: Sequence[int]
) -> EngineRequest | None:
    """What generates the response of a sample, or the rest of it; None where no room is left: it is truncated then.

    Args:
        ids: prompt, and response so far; become the sample's tokens if it has none.

    Raises:
        ValueError: the sample is finished.
        DataError: ids that the model does not know.
    """
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise ValueError(f"sample {sample.index} has status {sample.status.value}: there is nothing to generate")
    check_token_ids(sample, ids, args.hf_checkpoint)
    room = response_room(args, sample, len(ids), sampling_params["max_new_tokens"])
    if not sample.tokens:
        sample.tokens = list(ids)
    if room <= 0:
        sample.status = Sample.Status.TRUNCATED
        return None
    payload = {
        "input_ids": ids,
        "sampling_params": {**sampling_params, "max_new_tokens": room},
        "return_logprob": True,
    }
    headers = None
    if sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing":
        headers = {"X-SMG-Routing-Key": sample.session_id}
    return EngineRequest(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload, headers)
