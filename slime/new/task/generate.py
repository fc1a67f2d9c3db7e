"""Generation in up to two turns. ``--custom-generate-function-path generate.py``.

Without this flag a sample is one turn: leave the file out if your task needs no more.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.data import Sample
from slime.rollout.sglang_rollout import GenerateState, generate

MAX_TURNS = 2
TOKENS_PER_TURN = 4


def environment(sample: Sample) -> str | None:
    """The reply to the last answer, None if the conversation is over. Here you would run a tool."""
    return None if sample.response.strip().splitlines()[-1:] == [sample.label] else "no"


async def custom_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Ask the model, and after a wrong answer once more."""
    tokenizer = GenerateState(args).tokenizer
    for turn in range(1, MAX_TURNS + 1):
        room = min(sample.response_length + TOKENS_PER_TURN, sampling_params["max_new_tokens"])
        # Continues from the tokens of the sample. max_new_tokens counts its whole response, with all turns.
        sample = await generate(args, sample, sampling_params | {"max_new_tokens": room})
        sample.metadata["turns"] = turn
        reply = environment(sample)
        if sample.status is not Sample.Status.COMPLETED or reply is None or turn == MAX_TURNS:
            break
        # The next message of the user, with the marks of the chat template. The model does not learn to write it.
        text = f"\n<|im_start|>user\n{reply}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(text, add_special_tokens=False)
        sample.append_response_tokens(args, tokens=ids, text=text, trainable=False)
        sample.status = Sample.Status.PENDING  # generate continues only a sample that is not finished
    return sample
