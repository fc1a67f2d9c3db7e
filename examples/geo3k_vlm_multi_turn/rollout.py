"""Several turns with an environment that answers in text and pictures.

prompt with a picture -> answer                 the model
                         "no", another picture  the environment, loss mask 0
                         answer                 the model

--custom-generate-function-path examples.geo3k_vlm_multi_turn.rollout.generate --max-turns 2
--custom-config-path examples/geo3k_vlm_multi_turn/geo3k.yaml
"""

from __future__ import annotations

import asyncio
import importlib
from argparse import Namespace
from typing import Any

import torch

from slime.data.processing import process_vision_info, render_continuation, run_processor
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as generate_turn

__all__ = ["append_message", "generate"]

DEFAULT_MAX_TURNS = 2


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Turn after turn until the environment is done, ``--max-turns`` are over, or the response is full.

    The reward is 1 for a right answer in the first turn, 1/2 in the second turn, and so on.
    """
    environment = importlib.import_module(args.rollout_interaction_env_path).build_env(sample, args)
    environment.reset()
    last = (args.max_turns or DEFAULT_MAX_TURNS) - 1
    try:
        while True:
            sample = await generate_turn(args, sample, sampling_params)
            if sample.status is Sample.Status.ABORTED:  # a later rollout continues it from its tokens
                return sample
            # In the metadata, not in local variables: a continued sample resumes in its turn.
            turn, begin = sample.metadata.get("turn", 0), sample.metadata.get("turn_begin", 0)
            # Grading and images take time, and the event loop serves all other samples.
            observation, is_over, info = await asyncio.to_thread(environment.step, sample.response[begin:])
            sample.reward = info["is_right"] / (turn + 1)
            is_over = is_over or turn == last or _has_sampled_placeholder(args, sample)
            if is_over or sample.status is not Sample.Status.COMPLETED:
                return sample
            await asyncio.to_thread(append_message, args, sample, environment.format_observation(observation))
            sample.metadata |= {"turn": turn + 1, "turn_begin": len(sample.response)}
            sample.status = Sample.Status.PENDING
    finally:
        environment.close()


def _has_sampled_placeholder(args: Namespace, sample: Sample) -> bool:
    """Whether the model wrote a token that means a picture: an engine would look for that picture and refuse."""
    processor = GenerateState(args).processor
    placeholders = {getattr(processor, f"{kind}_token_id", None) for kind in ("image", "video")}
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    mask = sample.loss_mask or [1] * sample.response_length
    return any(token in placeholders and trained for token, trained in zip(response, mask, strict=True))


def append_message(args: Namespace, sample: Sample, message: dict[str, Any]) -> None:
    """Append a message of the environment, pictures included, which the model reads and is not trained on."""
    state = GenerateState(args)
    text = render_continuation(state.tokenizer, [message], tokens=sample.tokens)
    media = process_vision_info([message], state.processor)
    if media["images"]:
        ids, inputs = run_processor(state.processor, text, media)
        held, known = sample.multimodal_inputs or {}, sample.multimodal_train_inputs or {}
        # new objects: the other samples of the prompt may hold the old ones
        sample.multimodal_inputs = held | {"images": [*(held.get("images") or []), *media["images"]]}
        sample.multimodal_train_inputs = known | {
            name: torch.cat([known[name], value]) if name in known else value for name, value in (inputs or {}).items()
        }
    else:
        ids = state.tokenizer.encode(text, add_special_tokens=False)
    sample.append_response_tokens(args, tokens=ids, text=text, trainable=False)
