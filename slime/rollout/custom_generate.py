"""Calling users' generate functions, in either convention, and completing what they leave out.

f(args, sample, sampling_params[, evaluation])     per sample
f(args, samples[, sampling_params][, evaluation])  per group, recognised by the parameter ``samples``, or by a second
                                                   parameter that is annotated with a list

A call may take --custom-generate-timeout seconds; then it counts as raised, and the rollout tries the sample again.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.data.chat import render_chat
from slime.data.sample import Sample, iter_samples
from slime.hooks.load import accepts, annotation, name_of
from slime.rollout.collect import mask_older_tokens
from slime.rollout.engine_request import cut_stop_token
from slime.rollout.failures import fresh_copy, generate_with_retries, is_given_up
from slime.rollout.rm_hub.scoring import score
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.settings import is_ending, setting
from slime.utils.async_utils import call_user, is_async
from slime.utils.errors import DataError

__all__ = [
    "call_generate",
    "call_group_generate",
    "complete",
    "generate_whole_group",
    "refuse_stray_abort",
    "takes_group",
]

logger = logging.getLogger(__name__)


def takes_group(function: Callable[..., Any]) -> bool:
    """Whether ``function`` generates all samples of a prompt at once."""
    return accepts(function, "samples") or annotation(function, 1).startswith(("list", "sequence"))


async def call_generate(
    function: Callable[..., Any], args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    """One sample, or the samples that one execution was cut into.

    Raises:
        TimeoutError: ``--custom-generate-timeout`` passed.
        DataError: it returned something else.
    """
    kwargs = {"evaluation": evaluation} if accepts(function, "evaluation") else {}
    result = await _call(function, args, _prepared(function, sample), sampling_params, **kwargs)
    if not isinstance(result, Sample | list) or not list(iter_samples(result)):
        raise DataError(
            f"--custom-generate-function-path {name_of(function)} returned {type(result).__name__}; it must return the "
            "sample, or a list of samples"
        )
    return result


async def call_group_generate(
    function: Callable[..., Any], args: Any, group: list[Any], sampling_params: dict[str, Any], evaluation: bool
) -> list[Any]:
    """The samples of one prompt; as many entries as went in. Raises as :func:`call_generate` does."""
    samples = [_prepared(function, sample) for sample in group]
    offered = {"sampling_params": sampling_params, "evaluation": evaluation}
    result = await _call(function, args, samples, **{k: v for k, v in offered.items() if accepts(function, k)})
    if not isinstance(result, list) or len(result) != len(group):
        got = f"{len(result)} samples" if isinstance(result, list) else type(result).__name__
        raise DataError(
            f"--custom-generate-function-path {name_of(function)} returned {got} for a group of {len(group)}; it must "
            "return a list with one entry per sample"
        )
    return result


async def _call(function: Callable[..., Any], args: Any, *arguments: Any, **kwargs: Any) -> Any:
    seconds = setting(args, "custom_generate_timeout")
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call_user(function, args, *arguments, **kwargs)
    except TimeoutError:
        if not limit.expired():  # its own
            raise
        raise TimeoutError(
            f"it did not return within {seconds:g} s: fix it, or raise --custom-generate-timeout (seconds per call)"
        ) from None


def _prepared(function: Callable[..., Any], sample: Sample) -> Sample:
    """What ``function`` may change: the sample; a copy for one that runs in a thread, because threads cannot be ended,
    and one that is late must not write into the sample of the next attempt."""
    if not is_async(function):
        copied = fresh_copy(sample)
        if hasattr(sample, "trace"):
            copied.trace = sample.trace  # type: ignore[attr-defined]  # open spans go on in it
        sample = copied
    if sample.loss_mask is None and sample.response_length == 0:
        sample.loss_mask = []  # users write ``sample.loss_mask += [1] * n``
    return sample


def complete(result: Any, source: Sample, tokenizer: Callable[[], Any]) -> None:
    """Fill in, in place, what a custom function may leave out of the samples it made from ``source``.

    Args:
        tokenizer: gives the tokenizer; only asked for samples that have text and no tokens.
    """
    siblings = list(iter_samples(result))
    for sample in siblings:
        if isinstance(sample.status, str):
            logger.warning("sample %s: status is the text %r instead of a Sample.Status", source.index, sample.status)
            sample.status = Sample.Status(sample.status)
        if sample.metadata is None:
            sample.metadata = dict(source.metadata)
        if hasattr(source, "trace") and not hasattr(sample, "trace"):
            sample.trace = source.trace  # type: ignore[attr-defined]
        sample.index = source.index if sample.index is None else sample.index
        sample.group_index = source.group_index if sample.group_index is None else sample.group_index
        if len(siblings) > 1 and sample.rollout_id is None:
            sample.rollout_id = source.rollout_id if source.rollout_id is not None else source.index
        if not sample.tokens and sample.response:
            _tokenize(sample, tokenizer())
        if not sample.loss_mask:
            sample.loss_mask = None
        if sample.status is Sample.Status.PENDING:
            sample.status = Sample.Status.COMPLETED


def refuse_stray_abort(state: Any, result: Any, evaluation: bool) -> None:
    """An engine may abort a request that nobody wanted to end: its sample is generated again.

    Args:
        state: the ``GenerateState`` of the process.

    Raises:
        RuntimeError: a sample was aborted although the rollout goes on.
    """
    is_expected = is_ending(state) or (getattr(state, "requeues_aborted", False) and not evaluation)
    if not is_expected and any(sample.status is Sample.Status.ABORTED for sample in iter_samples(result)):
        raise RuntimeError("the engine aborted the request although the rollout goes on")


def _tokenize(sample: Sample, tokenizer: Any) -> None:
    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = render_chat(tokenizer, prompt, tools=sample.metadata.get("tools"), add_generation_prompt=True)
    response = tokenizer.encode(sample.response, add_special_tokens=False)
    sample.tokens = [*tokenizer.encode(prompt, add_special_tokens=False), *response]
    sample.response_length = len(response)
    logger.warning(
        "sample %s: the custom generate function gave text only. Its tokens were made from the text, and the engine's "
        "log-probs of them are unknown; Sample.append_response_tokens keeps both",
        sample.index,
    )


# Custom generate functions that receive all samples of a prompt at once: who of the group still needs them, and what
# they leave out.
#
# Called by the default rollout for functions that :func:`slime.rollout.custom_generate.takes_group` recognises.


async def generate_whole_group(
    args: Namespace,
    state: Any,
    function: Callable[..., Any],
    group: list[Any],
    sampling_params: dict[str, Any],
    evaluation: bool,
) -> list[Any]:
    """The group with the samples that ``function`` made, after the sample hooks, scored unless that is done together.

    Samples that came back from the data source finished are not generated again, as in the functions for one sample.

    Args:
        state: the ``GenerateState`` of the process.
    """
    unfinished = [sample for sample in iter_samples(group) if not _is_finished(sample)]
    if setting(args, "partial_rollout") and setting(args, "mask_offpolicy_in_partial_rollout"):
        mask_older_tokens(list(unfinished))

    async def attempt() -> list[Any]:
        result = await call_group_generate(function, args, list(unfinished), dict(sampling_params), evaluation)
        for entry, source in zip(result, unfinished, strict=True):
            complete(entry, source, lambda: state.tokenizer)
            cut_stop_token(args, entry, sampling_params, state.tokenizer)
        refuse_stray_abort(state, result, evaluation)
        return result

    async with state.places.of_a_group(len(unfinished)):
        if is_ending(state):
            return group
        made: list[Any] | None = None
        if unfinished:
            made = await generate_with_retries(
                attempt,
                unfinished,
                retries=setting(args, "max_sample_retries"),
                what=f"--custom-generate-function-path {name_of(function)}",
            )
    if made is not None:
        made = await apply_rollout_sample_hooks(args, made, evaluation=evaluation)
        group = _put_in(group, dict(zip(map(id, unfinished), made, strict=True)))
    if not setting(args, "group_rm"):
        await asyncio.gather(*(score(args, entry) for entry in group))
    return group


def _is_finished(sample: Sample) -> bool:
    return sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) or is_given_up(sample)


def _put_in(group: list[Any], made: dict[int, Any]) -> list[Any]:
    """The group with what was made of a sample in its place; the rows of one execution stay one flat list."""
    entries = []
    for entry in group:
        if isinstance(entry, Sample):
            entries.append(made.get(id(entry), entry))
        else:
            entries.append(list(iter_samples([made.get(id(sample), sample) for sample in iter_samples(entry)])))
    return entries
