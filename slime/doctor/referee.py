"""The referee of ``slime doctor mismatch``: the model in transformers, one sample at a time, in float32."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from slime.doctor.mismatch_input import Row
from slime.utils.errors import DataError

__all__ = ["Opinion", "Referee"]


@dataclass(frozen=True)
class Opinion:
    """What the model says about one response.

    Attributes:
        logits: of the distributions that the response tokens were drawn from, ``[R, V]``, float32.
        ids: the response tokens, ``[R]``.
        router_margin: smallest gap, over the layers, between the last expert that was chosen and the first that was
            not, in router logits, ``[R]``; None for models without experts.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    router_margin: torch.Tensor | None = None

    def log_probs(self, temperature: float) -> torch.Tensor:
        """Of the response tokens, ``[R]``."""
        return self._chosen(torch.log_softmax(self.logits.double() / temperature, -1))

    def nucleus(self, temperature: float, share: float) -> torch.Tensor:
        """The same where only the most likely tokens that make up ``share`` can be drawn; a token outside of them
        keeps its own."""
        log_probs = torch.log_softmax(self.logits.double() / temperature, -1)
        ranked, order = log_probs.exp().sort(-1, descending=True)
        is_kept = ranked.cumsum(-1) - ranked < share  # up to the one that reaches the share
        mass = (ranked * is_kept).sum(-1)
        in_nucleus = torch.zeros_like(is_kept).scatter(-1, order, is_kept)
        kept = in_nucleus.gather(-1, self.ids[:, None]).squeeze(-1)
        return self._chosen(log_probs) - torch.where(kept, mass.log(), torch.zeros_like(mass))

    def _chosen(self, log_probs: torch.Tensor) -> torch.Tensor:
        return log_probs.gather(-1, self.ids[:, None]).squeeze(-1)


class Referee:
    """A Hugging Face checkpoint that gives opinions."""

    def __init__(self, model: Any, checkpoint: str) -> None:
        self._model = model
        self.checkpoint = checkpoint

    @classmethod
    def load(cls, checkpoint: str) -> Referee:
        """Raises DataError for a checkpoint that transformers cannot load."""
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise DataError(f"{checkpoint} cannot be the referee: {error}") from None
        return cls(model.eval(), checkpoint)

    def in_bfloat16(self) -> Referee:
        return Referee(copy.deepcopy(self._model).to(torch.bfloat16), self.checkpoint)

    @torch.no_grad()
    def opinion(self, row: Row) -> Opinion:
        """One forward pass over the whole sample."""
        ids = torch.tensor([row.tokens])
        experts = getattr(self._model.config, "num_experts_per_tok", None)
        extra = {"output_router_logits": True} if experts else {}
        output = self._model(input_ids=ids, **extra)
        places = slice(row.num_prompt - 1, len(row.tokens) - 1)  # the place before a token is where it was drawn
        router = getattr(output, "router_logits", None)
        margin = None
        if router and experts is not None and experts < router[0].shape[-1]:  # all experts leave nothing to choose
            margin = _margin(router, experts)[places]
        return Opinion(output.logits[0, places].float(), ids[0, row.num_prompt :], margin)


def _margin(router_logits: tuple[torch.Tensor, ...], num_chosen: int) -> torch.Tensor:
    """``[L]``, from one ``[L, experts]`` per layer."""
    gaps = []
    for logits in router_logits:
        ranked = logits.float().sort(-1, descending=True).values
        gaps.append(ranked[:, num_chosen - 1] - ranked[:, num_chosen])
    return torch.stack(gaps).min(0).values
