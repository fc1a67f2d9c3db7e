"""The generation request of one sample. Built here once, whoever sends it: whole or as a stream."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from slime.data.media import encode_image_for_rollout_engine, load_processor, with_single_placeholders
from slime.data.sample import Sample
from slime.data.sampling_mask import LACKS_SETS, cuts_vocabulary, lacks_sets
from slime.rollout.direct_engines import PAST_THE_ROUTER
from slime.rollout.sampling import check_token_ids, response_room
from slime.utils.errors import EngineError
from slime.utils.http_utils import Url

__all__ = ["EngineRequest", "build_request", "check_reply"]


@dataclass(frozen=True, eq=False)
class EngineRequest:
    """Ready to be sent, once or again. ``rids`` are the ids under which it was."""

    url: Url
    payload: dict[str, Any]
    headers: dict[str, str] | None
    rids: list[str] = field(default_factory=list)

    @property
    def goes_past_the_router(self) -> bool:
        """Whether it asks for something that the router drops from requests."""
        return not PAST_THE_ROUTER.isdisjoint(self.payload)

    def new_attempt(self) -> dict[str, Any]:
        """The payload with an id of its own: an attempt that got lost may still be running under its id."""
        self.rids.append(uuid4().hex)
        return self.payload | {"rid": self.rids[-1]}


def build_request(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], ids: Sequence[int], *, is_trained: bool = True
) -> EngineRequest | None:
    """What generates the response of a sample, or the rest of it; None where no room is left: it is truncated then.

    Args:
        ids: prompt, and response so far; become the sample's tokens if it has none.
        is_trained: not of an evaluation, for which what only the trainer needs is left out.

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
        **_prompt(args, sample, ids),
        "sampling_params": {**sampling_params, "max_new_tokens": room},
        "return_logprob": True,
    }
    if getattr(args, "use_rollout_routing_replay", False):  # not a flag of this room
        payload["return_routed_experts"] = True
    if is_trained and cuts_vocabulary(args):
        payload["return_sampling_mask"] = True
    headers = None
    if sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing":
        headers = {"X-SMG-Routing-Key": sample.session_id}
    return EngineRequest(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload, headers)


def check_reply(request: EngineRequest, sample: Sample, reply: Any) -> dict[str, Any]:
    """The reply, if it is one of an SGLang server that told what it was asked for.

    A request that is aborted while it waits in the engine's queue, having been put back there, comes with its tokens
    but without their sets: those tokens cannot be trained and are dropped, as if none had been generated yet.

    Raises:
        EngineError: it is not.
    """
    if not isinstance(reply, dict) or "meta_info" not in reply:
        raise EngineError(f"the reply for sample {sample.index} is not that of an SGLang server: {str(reply)[:300]}")
    meta = reply["meta_info"]
    if lacks_sets(request.payload, meta):
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            return reply | {"text": "", "meta_info": meta | {"output_token_logprobs": [], "completion_tokens": 0}}
        raise EngineError(f"sample {sample.index}: {LACKS_SETS}")
    return reply


def _prompt(args: Namespace, sample: Sample, ids: Sequence[int]) -> dict[str, Any]:
    """Token ids; with images the text until there is a response. The engine fills in the placeholders of images."""
    images = (sample.multimodal_inputs or {}).get("images")
    if not images:
        return {"input_ids": ids}
    image_data = [encode_image_for_rollout_engine(image) for image in images]
    if sample.response_length == 0:
        return {"image_data": image_data, "text": sample.prompt}
    processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
    return {"image_data": image_data, "input_ids": with_single_placeholders(processor, ids)}
