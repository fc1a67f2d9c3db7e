"""Custom generation in both forms that ``--custom-generate-function-path`` accepts.

    --custom-generate-function-path examples/custom_generate/custom_generate.py --max-turns 2    custom_generate
    --custom-generate-function-path examples/custom_generate/custom_generate.py:best_of_group    a prompt per call

``custom_generate`` plays a guessing game of several turns: after a wrong answer the model gets a hint whether its
number is too low or too high, and tries again. ``metadata`` of the data row (``--metadata-key``) selects the hints.
"""

from __future__ import annotations

import asyncio
import re
from argparse import Namespace
from typing import Any

from slime.data import Sample
from slime.rollout.sglang_rollout import GenerateState, generate

__all__ = ["best_of_group", "custom_generate", "hint"]

DEFAULT_MAX_TURNS = 2
TOKENS_PER_TURN = 6
_NUMBER = re.compile(r"\d+")


async def custom_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Up to ``--max-turns`` turns. The reward is set here, so no reward function is asked."""
    state = GenerateState(args)
    sample.reward = 0.0
    for turn in range(args.max_turns or DEFAULT_MAX_TURNS):
        start = len(sample.response)
        room = min(sample.response_length + TOKENS_PER_TURN, sampling_params["max_new_tokens"])
        # Continues from the tokens of the sample. max_new_tokens counts its whole response, hints included.
        sample = await generate(args, sample, sampling_params | {"max_new_tokens": room})
        if sample.status is Sample.Status.ABORTED:
            # An aborted sample is continued later. A reward of 0 would pass for its final one.
            sample.reward = None
            return sample
        # From the start of this turn: hints and earlier answers contain numbers too.
        number = _NUMBER.search(sample.response, start)
        if number is not None and number[0] == str(sample.label):
            sample.reward = 1.0 / (turn + 1)
            sample.metadata["turns"] = turn + 1
            break
        if sample.response_length >= sampling_params["max_new_tokens"]:
            break
        if turn + 1 < (args.max_turns or DEFAULT_MAX_TURNS):
            text = hint(number and number[0], sample)
            ids = state.tokenizer.encode(text, add_special_tokens=False)
            sample.append_response_tokens(args, tokens=ids, text=text, trainable=False)  # loss mask 0
            # generate continues only a sample that is not finished.
            sample.status = Sample.Status.PENDING
    return sample


def hint(answer: str | None, sample: Sample) -> str:
    """The next message of the user, with the marks of the chat template."""
    if answer is None:
        text = "a number, please."
    elif sample.metadata.get("hints") == "direction":
        text = "too low." if int(answer) < int(sample.label) else "too high."
    else:
        text = "no."
    end = "" if sample.status is Sample.Status.COMPLETED else "<|im_end|>"  # a turn that is over has written it
    return f"{end}\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


async def best_of_group(args: Namespace, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
    """All samples of a prompt in one call: those with the most right digits get reward 1, the others 0.

    Recognized by the parameter ``samples``. As many samples must come back as went in.
    """
    params = GenerateState(args).sampling_params
    results = await asyncio.gather(*(generate(args, sample, dict(params)) for sample in samples))
    # Half a group has no comparison. All of it comes back in a later rollout.
    if any(sample.status is Sample.Status.ABORTED for sample in results):
        return list(results)
    scores = [sum(a == b for a, b in zip(_digits(sample), str(sample.label), strict=False)) for sample in results]
    for sample, score in zip(results, scores, strict=True):
        sample.reward = float(score == max(scores) > 0)
        sample.loss_mask = [1] * sample.response_length
    return list(results)


def _digits(sample: Sample) -> str:
    found = _NUMBER.search(sample.response)
    return found[0] if found else ""
