"""Functions that the end-to-end tests pass to train.py the way a user passes theirs."""

import asyncio
import os
import sys
import time
from pathlib import Path


async def share_of_sevens(args, sample, **kwargs):
    """A reward any model can climb: how much of the response is the digit 7."""
    text = sample.response.strip()
    return text.count("7") / max(1, len(text))


def _is_held(args, sample):
    """Whether a file ``hold`` holds the rollout of ``sample``: a test decides when it may end.

    The file holds the rollout whose number is in it and later ones. Without a number it holds all.
    """
    try:
        first = int((Path(args.output_dir) / "hold").read_text() or 0)
    except FileNotFoundError:
        return False
    return sample.group_index >= first * args.rollout_batch_size


async def share_of_sevens_unless_held(args, sample, **kwargs):
    """Wait while the rollout is held."""
    while _is_held(args, sample):
        await asyncio.sleep(0.05)
    return await share_of_sevens(args, sample, **kwargs)


def wait_before_a_step(args, rollout_id, *others):
    """Wait while there is a file ``hold_R``: a test decides when the trainer takes a step on rollout R."""
    while (Path(args.output_dir) / f"hold_{rollout_id}").exists():
        time.sleep(0.05)


async def generate_while_held(args, sample, sampling_params):
    """Generate again and again while the rollout is held, unless two engines made the response."""
    from slime.rollout.failures import fresh_copy
    from slime.rollout.sglang_rollout import generate

    while True:
        made = await generate(args, fresh_copy(sample), dict(sampling_params))
        is_cut = made.status is made.Status.ABORTED
        if is_cut or len(made.weight_versions) > 1 or not _is_held(args, sample):
            vars(sample).update(vars(made))
            return sample


generate_while_held.continues_aborted = True


async def reward_with_a_breakpoint(args, sample, **kwargs):
    breakpoint()
    return await share_of_sevens(args, sample)


async def hostile_answers(args, sample, sampling_params):
    """Replace the model's text by answers that the grader cannot grade in time. One call exits.

    In the second rollout a call ends the whole process.
    """
    from slime.rollout.sglang_rollout import generate

    if sample.group_index >= args.rollout_batch_size:
        os._exit(3)
    if sample.index == 3:
        sys.exit(3)
    sample = await generate(args, sample, sampling_params)
    nested = "\\frac{" * 30 + "\\begin{a}" + "}{9}" * 30  # the LaTeX parser's time doubles with every level
    sample.response = rf"\boxed{{{nested}}}" if sample.index == 5 else r"\boxed{9^0xfffffff}"
    return sample


def hanging_reward(args, sample, **kwargs):
    time.sleep(3600)


async def sevens_and_what_the_reference_says(args, sample, **kwargs):
    """The share of sevens. The metadata gets the weight version of the model ``ref``, which is asked as well."""
    from slime.rollout.sglang_rollout import get_model_url
    from slime.utils.http_utils import post

    body = {"input_ids": sample.tokens[:8], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    answer = await post(get_model_url(args, "ref"), body | {"return_logprob": True})
    sample.metadata["ref"] = {
        "version": answer["meta_info"]["weight_version"],
        "logprob": answer["meta_info"]["output_token_logprobs"][0][0],
    }
    return await share_of_sevens_unless_held(args, sample)


async def two_turns(args, sample, sampling_params):
    """The model writes, an environment answers ``=7``, which is not trained, and the model writes again."""
    return await _two_turns(args, sample, sampling_params, "=7")


async def two_other_turns(args, sample, sampling_params):
    """The same after a change of the environment."""
    return await _two_turns(args, sample, sampling_params, "=8")


async def _two_turns(args, sample, sampling_params, text):
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post

    tokenizer = GenerateState(args).tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    for turn in range(2):
        body = {"input_ids": sample.tokens, "sampling_params": {**sampling_params, "max_new_tokens": 6}}
        meta = (answer := await post(url, body | {"return_logprob": True}))["meta_info"]
        sampled = meta["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[item[1] for item in sampled],
            log_probs=[item[0] for item in sampled],
            text=answer["text"],
            meta_info=meta,
        )
        if turn == 0:
            observation = tokenizer.encode(text, add_special_tokens=False)
            sample.append_response_tokens(args, tokens=observation, trainable=False, text=text)
    return sample
