"""Answers the requests of a replay, in place of an engine, with the tokens that the run recorded.

A request whose ids are the beginning of the recorded sample gets the tokens that follow there, up to the next tokens
that the model did not write. Requests of text are answered in the order of the recording. Any other request
is refused with the position of its first difference: the code has changed, or a tool returned something else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime.data.sample import Sample
from slime.data.sampling_mask import SAMPLING_MASK


@dataclass(frozen=True)
class _Turn:
    """Response tokens ``[start, end)`` that one request wrote, counted from the start of the sample."""

    start: int
    end: int


class Recording:
    """The turns of one sample.

    Args:
        tokenizer: decodes the texts of the replies.
    """

    def __init__(self, sample: Sample, tokenizer: Any) -> None:
        self._sample = sample
        self._tokenizer = tokenizer
        self._turns = list(_turns(sample))
        self.num_answered = 0

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def _refused(self, reason: str) -> ValueError:
        return ValueError(f"slime replay: request {self.num_answered + 1} {reason}")

    def answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            ValueError: the request is not in the recording.
        """
        ids = payload.get("input_ids")
        turn = self._next_in_order() if ids is None else self._after(ids)
        self.num_answered += 1
        return self._reply(turn, len(ids) if ids is not None else turn.start)

    def _next_in_order(self) -> _Turn:
        if self.num_answered >= len(self._turns):
            raise self._refused(f"has no reply: the recording has {len(self._turns)} turns")
        return self._turns[self.num_answered]

    def _after(self, ids: Sequence[int]) -> _Turn:
        recorded = self._sample.tokens
        # a request may be longer than the recording: the missing tokens are None
        pairs = enumerate(itertools.zip_longest(ids, recorded[: len(ids)]))
        apart = next((place for place, (asked, known) in pairs if asked != known), None)
        if apart is not None:
            known = recorded[apart] if apart < len(recorded) else "the end"
            raise self._refused(
                f"departs from the recording at token {apart}: it has {ids[apart]}, recorded is {known}. "
                "The prompt, the template, a tool or the code has changed."
            )
        # a request may begin within a turn: a weight update aborts requests, and the rollout sends the rest again
        turn = next((turn for turn in self._turns if turn.start <= len(ids) < turn.end), None)
        if turn is None:
            raise self._refused(f"has no reply: after token {len(ids)} the model wrote nothing")
        return _Turn(len(ids), turn.end)

    def _reply(self, turn: _Turn, num_prompt: int) -> dict[str, Any]:
        sample = self._sample
        ids = sample.tokens[turn.start : turn.end]
        begin = len(sample.tokens) - sample.response_length
        # a reply needs a number per token, also if the run recorded none
        log_probs = (sample.rollout_log_probs or [0.0] * sample.response_length)[turn.start - begin : turn.end - begin]
        # only the last turn can have reached the limit of tokens
        was_cut = turn.end == len(sample.tokens) and sample.status is Sample.Status.TRUNCATED
        versions = sample.weight_versions
        meta: dict[str, Any] = {
            "id": f"replay-{self.num_answered}",
            "finish_reason": {"type": "length" if was_cut else "stop"},
            "prompt_tokens": num_prompt,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "output_token_logprobs": [[p, token, None] for p, token in zip(log_probs, ids, strict=True)],
        }
        if sample.rollout_top_p_token_offsets is not None:
            sets, offsets = list(sample.rollout_top_p_token_ids), list(sample.rollout_top_p_token_offsets)
            borders = itertools.pairwise(offsets[turn.start - begin : turn.end - begin + 1])
            meta[SAMPLING_MASK] = [[int(token) for token in sets[a:b]] for a, b in borders]
        if versions:
            # there may be fewer versions than turns: later turns get the last one
            meta["weight_version"] = versions[min(self.num_answered, len(versions)) - 1]
        return {"text": self._tokenizer.decode(ids, skip_special_tokens=False), "output_ids": ids, "meta_info": meta}


def _turns(sample: Sample) -> Iterator[_Turn]:
    """Yield the stretches of trained tokens. The tokens between them come from tools or environments."""
    place = len(sample.tokens) - sample.response_length
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    for is_own, stretch in itertools.groupby(mask):
        length = len(list(stretch))
        if is_own:
            yield _Turn(place, place + length)
        place += length
