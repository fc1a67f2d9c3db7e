"""The generation request of one sample. Built here once, whoever sends it: whole or as a stream."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from slime.data.media import encode_image_for_rollout_engine
from slime.data.sample import Sample
from slime.rollout.sampling import check_token_ids, response_room
from slime.utils.http_utils import Url

__all__ = ["EngineRequest", "build_request", "returns_experts"]


@dataclass(frozen=True, eq=False)
class EngineRequest:
    """Ready to be sent, once or again. ``rids`` are the ids under which it was."""

    url: Url
    payload: dict[str, Any]
    headers: dict[str, str] | None
    rids: list[str] = field(default_factory=list)

    def new_attempt(self) -> dict[str, Any]:
        """The payload with an id of its own: an attempt that got lost may still be running under its id."""
        self.rids.append(uuid4().hex)
        return self.payload | {"rid": self.rids[-1]}


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
        **_prompt(sample, ids),
        "sampling_params": {**sampling_params, "max_new_tokens": room},
        "return_logprob": True,
    }
    if returns_experts(args):
        payload["return_routed_experts"] = True
    headers = None
    if sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing":
        headers = {"X-SMG-Routing-Key": sample.session_id}
    return EngineRequest(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload, headers)


def returns_experts(args: Namespace) -> bool:
    """Whether engines tell which experts they chose (``--use-rollout-routing-replay``): past the router, which drops
    the question."""
    return bool(getattr(args, "use_rollout_routing_replay", False))  # not a flag of this room


def _prompt(sample: Sample, ids: Sequence[int]) -> dict[str, Any]:
    """Token ids; with images the text, whose placeholders the engine fills in itself, until there is a response."""
    images = (sample.multimodal_inputs or {}).get("images")
    if not images:
        return {"input_ids": ids}
    image_data = [encode_image_for_rollout_engine(image) for image in images]
    begun = sample.response_length > 0
    return {"image_data": image_data} | ({"input_ids": ids} if begun else {"text": sample.prompt})
