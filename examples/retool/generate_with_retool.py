"""Problems that are solved with a Python interpreter: the model writes code, the sandbox's output comes back masked.

    question -> reasoning <code>print(..)</code>    the model stops here
                <interpreter>output</interpreter>   appended by this file, loss mask 0
                reasoning <answer>..</answer>

The form of ReTool (Feng et al. 2025, arXiv:2504.11536, sec. 3.2): code in the middle of the reasoning, the
interpreter's output is context and never a target.

    --custom-generate-function-path examples.retool.generate_with_retool.generate
    --custom-rm-path examples.retool.generate_with_retool.reward_func --reward-key score
    --custom-config-path examples/retool/retool.yaml
"""

from __future__ import annotations

import asyncio
import re
import time
import weakref
from argparse import Namespace
from typing import Any

from examples.retool.sandbox import Limits, Result, run_python
from slime.data.sample import Sample
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as generate_turn

__all__ = ["code_block", "final_answer", "generate", "observation", "reward_func"]

STOP = ["</code>", "</answer>"]
DEFAULT_MAX_TURNS = 8

_CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_FENCE = re.compile(r"\s*```(?:python|py)?\s*\n(.*?)```\s*", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_END_OF_OUTPUT = "</interpreter>"
# By event loop: a semaphore belongs to the loop that first waits on it. Weak, so that ended loops are freed.
_places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Turn after turn until the model stops without code, ``--max-turns`` blocks were run, or the response is full."""
    params = {**sampling_params, "stop": [*(sampling_params.get("stop") or []), *STOP]}
    tokenizer = GenerateState(args).tokenizer
    while True:
        sample = await generate_turn(args, sample, params)
        code = code_block(sample.response)
        runs = sample.metadata.get("code_runs", 0)
        # Truncated and aborted samples end here too. A later rollout continues aborted ones from their tokens.
        if (
            sample.status is not Sample.Status.COMPLETED
            or code is None
            or runs >= (args.max_turns or DEFAULT_MAX_TURNS)
        ):
            return sample
        began = time.monotonic()
        result = await _run(args, code)
        # Seconds. Metrics list them apart from generation.
        sample.non_generation_time += time.monotonic() - began
        text = observation(result)
        sample.append_response_tokens(
            args, tokens=tokenizer.encode(text, add_special_tokens=False), text=text, trainable=False
        )
        sample.metadata["code_runs"] = runs + 1
        sample.metadata["failed_code_runs"] = sample.metadata.get("failed_code_runs", 0) + (result.kind != "ok")
        if GenerateState(args).aborted:  # the rollout has its samples
            sample.status = Sample.Status.ABORTED
            return sample
        sample.status = Sample.Status.PENDING


async def _run(args: Namespace, code: str) -> Result:
    places = _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(args.sandbox_processes))
    limits = Limits(
        timeout_s=args.sandbox_timeout,
        memory_bytes=args.sandbox_memory_mb << 20,
        output_bytes=args.sandbox_output_bytes,
    )
    async with places:
        return await run_python(code, limits)


def code_block(response: str) -> str | None:
    """The code at the end of the response, without a Markdown fence. None if it does not end with code."""
    # Only after the last output: earlier blocks have already run.
    text = response[response.rfind(_END_OF_OUTPUT) + len(_END_OF_OUTPUT) :] if _END_OF_OUTPUT in response else response
    blocks = list(_CODE.finditer(text))
    if not blocks or text[blocks[-1].end() :].strip():
        return None
    code = blocks[-1][1]
    fenced = _FENCE.fullmatch(code)
    return fenced[1] if fenced else code.strip()


def observation(result: Result) -> str:
    """The output of a run as the model gets it, without tags that look like the model's."""
    # Printed tags would pass for the model's answer or code.
    output = re.sub(r"</?(code|interpreter|answer)>", "", result.output).strip()
    return f"<interpreter>{output or 'no output'}</interpreter>"


def final_answer(response: str) -> str | None:
    """The last answer of the model. ``\\boxed{..}`` inside it is left to the grader."""
    answers = _ANSWER.findall(response)
    return answers[-1].strip() if answers else None


def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """``score`` for ``--reward-key score``: 1 for a right answer, else -1.

    ReTool rewards the outcome alone (arXiv:2504.11536, eq. 2): whether code helps is for the model to find out. The
    number of runs is for the metrics. Not async: symbolic comparison takes time, so it belongs into a thread.
    """
    answer = final_answer(sample.response)
    if answer is not None and "\\boxed" not in answer:
        answer = f"\\boxed{{{answer}}}"
    right = answer is not None and grade_answer_verl(answer, sample.label)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "code_runs": sample.metadata.get("code_runs", 0)}
