"""Custom generate functions that receive all samples of a prompt at once: who of the group still needs them, and what
they leave out.

Called by the default rollout for functions that :func:`slime.rollout.custom_generate.takes_group` recognises.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.data.sample import Sample, iter_samples
from slime.hooks.load import name_of
from slime.rollout.abort_requests import mask_older_tokens
from slime.rollout.custom_generate import call_group_generate, complete, refuse_stray_abort
from slime.rollout.failures import generate_with_retries, is_given_up
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.scoring import score
from slime.rollout.settings import is_ending, setting
from slime.rollout.stop_tokens import cut_stop_token

__all__ = ["generate_whole_group"]


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
