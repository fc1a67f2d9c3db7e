"""Fields of requests to engines, and of their replies, that flags ask for: sampling sets, and the adapter.

The sampling sets are the ids that each token was sampled from when top-p or top-k cut the vocabulary:

    ids       [K]      the concatenated sets of the response tokens
    offsets   [R + 1]  begin of each token's set. First 0, last K. A token that was not sampled has an empty set.

Read from an engine's reply by ``Sample.append_response_tokens``, checked by ``slime.batch.compile``, replayed by
the trainer (``slime.algorithms.logprobs``). Importable without torch.

The adapter under which engines serve a LoRA policy has one name in the whole run, because a request may wait while
engines take new weights: engines replace the adapter of this name, and the request is answered by the new one. The
reply has its version (``weight_version``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import DataError

SAMPLING_MASK = "output_token_sampling_mask"
"""Key of the sets in a reply to a request with ``return_sampling_mask``, ``[tokens][ids]``."""

_RENORMALISED = "output_token_sampling_logprobs"

OUTPUT_LISTS = ("output_token_logprobs", SAMPLING_MASK, _RENORMALISED)
"""Lists of ``meta_info`` that have an entry for each token of an output."""

PAST_THE_ROUTER = frozenset({"return_routed_experts", "return_sampling_mask"})
"""Fields of requests that the router drops (``slime.rollout.direct_engines``)."""

REPLAY_TOP_K = 4000
"""``top_k`` of requests that cut by top-p alone: SGLang returns sets of a bounded size only (its
``--sampling-mask-max-tokens``, 4096). The cut of the rare larger nucleus is replayed like any other."""


ADAPTER_NAME = "policy"


@dataclass(frozen=True)
class FieldFlags:
    """The flags that decide about these fields. Arguments of users' programs may lack some."""

    rollout_top_p: float = 1.0
    rollout_top_k: int = -1
    loss_type: str = "policy_loss"
    lora_rank: int = 0
    lora_merge: bool = False
    debug_rollout_only: bool = False

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether ``--rollout-top-p`` or ``--rollout-top-k`` let engines sample from less than the whole vocabulary."""
        return self.rollout_top_p != 1.0 or self.rollout_top_k != -1

    @property
    def serves_adapter(self) -> bool:
        """Whether engines get an adapter. With ``--lora-merge`` they get whole weights, without a trainer nothing."""
        return bool(self.lora_rank) and not self.lora_merge and not self.debug_rollout_only

    @property
    def adapter_fields(self) -> dict[str, str]:
        """The fields by which a request to ``/generate`` of the trained model names the adapter. Empty without one."""
        return {"lora_path": ADAPTER_NAME} if self.serves_adapter else {}

    def check_sampling_sets(self, columns: Mapping[str, Any]) -> None:
        """Check that tokens sampled from a part of the vocabulary come with their sets.

        Raises:
            DataError: the flags cut the vocabulary, and a batch with trained tokens has no sets.
        """
        lacks_them = self.cuts_vocabulary and columns.get("rollout_top_p_token_offsets") is None
        if lacks_them and self.loss_type != "sft_loss" and any(bool(mask.any()) for mask in columns["loss_masks"]):
            raise DataError(
                f"--rollout-top-p {self.rollout_top_p} --rollout-top-k {self.rollout_top_k}: no sample of the rollout "
                "says which ids its tokens were sampled from. A custom generate function must send return_sampling_mask"
                " past the router (slime.rollout.sglang_rollout.generate does, or GenerateState(args).engines.choose())"
                " and pass meta_info to append_response_tokens; or use --rollout-top-p 1 --rollout-top-k -1."
            )


LACKS_SETS = (
    f"the engine did not say which ids it sampled from ({SAMPLING_MASK}), which --rollout-top-p below 1 and "
    "--rollout-top-k need: update SGLang to 0.5.23 or newer"
)


def lacks_sets(request: Mapping[str, Any], meta: Mapping[str, Any]) -> bool:
    """Whether a reply's ``meta_info`` has tokens without the sets that its ``request`` asked for."""
    has_tokens = bool(meta.get("output_token_logprobs"))
    return "return_sampling_mask" in request and has_tokens and SAMPLING_MASK not in meta


def sampled_tokens(meta: dict[str, Any]) -> tuple[list[int], list[float]]:
    """(ids, log-probs) of a reply's ``meta_info``: those of the distribution that was sampled from, cut or whole."""
    sampled = meta.get("output_token_logprobs") or []
    log_probs = meta.get(_RENORMALISED)
    # Without a cut there is one list of log-probs only.
    if log_probs is None:
        log_probs = [item[0] for item in sampled]
    return [item[1] for item in sampled], list(log_probs)
