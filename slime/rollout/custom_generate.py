"""Calls users' generate functions in both conventions, and completes the fields that they leave out.

    f(args, sample, sampling_params[, evaluation])     per sample
    f(args, samples[, sampling_params][, evaluation])  per group, known by the parameter ``samples``, or by a second
                                                       parameter that is annotated with a list

A call may take --custom-generate-timeout seconds. A longer call counts as an error, and the rollout tries the sample
again.

Sample hooks (``--rollout-sample-hook-path``) are users' functions between generation and reward. They see every sample,
in order.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from slime.data.processing import render_chat
from slime.data.sample import Sample, iter_samples
from slime.hooks import accepted_kwargs, accepts, load_function, name_of
from slime.rollout.base_types import complete_args
from slime.rollout.collect import mask_older_tokens
from slime.rollout.engine_request import cut_stop_token
from slime.rollout.failures import Attempts, is_given_up, traced_copy
from slime.rollout.rm_hub import score
from slime.utils.async_utils import call_user, is_async
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

evaluates: ContextVar[bool] = ContextVar("evaluates", default=False)
"""Whether the running task generates for an evaluation. The tasks that it starts inherit the value."""

on_begin: ContextVar[Callable[[], None]] = ContextVar("on_begin", default=lambda: None)
"""Called when a sample of the running task has its slot."""

_MAX_FRUITLESS = 8
"""Aborts in a row without a new token, of a request that the rollout wants to go on."""

_FRUITLESS_PAUSE_S = 0.1

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def is_ending(state: Any) -> bool:
    """Whether the rollout of the running task is over. A rollout does not end an evaluation."""
    return bool(state.aborted) and not evaluates.get()


def expects_aborts(state: Any) -> bool:
    """Whether the rollout takes samples back that an engine aborted: it ends, or a fully-async worker requeues them."""
    return is_ending(state) or (state.requeues_aborted and not evaluates.get())


async def until_finished(
    generate: Callable[[Sample, dict[str, Any]], Awaitable[Sample | list[Sample]]],
    function: Callable[..., Any] | None,
    state: Any,
    sample: Sample,
    sampling_params: dict[str, Any],
) -> Sample | list[Sample]:
    """Generate one sample. An engine that leaves aborts its requests: another one continues with the tokens so far.

    Args:
        generate: one attempt, by ``function`` if the user has one. After an abort only a function with the attribute
            ``continues_aborted`` is called again with its tokens.
    """
    num_fruitless = 0
    while True:
        length = sample.response_length
        result = await generate(sample, dict(sampling_params))
        continues = result is sample and (function is None or hasattr(function, "continues_aborted"))
        if not continues or sample.status is not Sample.Status.ABORTED or expects_aborts(state):
            return result
        num_fruitless = 0 if sample.response_length > length else num_fruitless + 1
        if num_fruitless > _MAX_FRUITLESS:
            return result
        await asyncio.sleep(_FRUITLESS_PAUSE_S * num_fruitless)  # the engine may still be listed


@dataclass(frozen=True)
class GenerateFunction:
    """A user's function, loaded, and the arguments that it receives."""

    args: Any
    function: Callable[..., Any]

    async def of_one(self, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Sample | list[Sample]:
        """Call it for one sample. It may cut one execution into several samples.

        Raises:
            TimeoutError: ``--custom-generate-timeout`` passed.
            DataError: it returned something else.
        """
        kwargs = {"evaluation": evaluation} if accepts(self.function, "evaluation") else {}
        result = await self._call(_own(self.function, sample), sampling_params, **kwargs)
        if not isinstance(result, Sample | list) or not list(iter_samples(result)):
            raise DataError(
                f"--custom-generate-function-path {name_of(self.function)} returned {type(result).__name__}; it must "
                "return the sample, or a list of samples"
            )
        return result

    async def of_group(self, group: list[Any], sampling_params: dict[str, Any], evaluation: bool) -> list[Any]:
        """Call it for the samples of one prompt. Returns one entry per sample. Raises as :meth:`of_one`."""
        samples = [_own(self.function, sample) for sample in group]
        offered = {"sampling_params": sampling_params, "evaluation": evaluation}
        kwargs = {name: value for name, value in offered.items() if accepts(self.function, name)}
        result = await self._call(samples, **kwargs)
        if not isinstance(result, list) or len(result) != len(group):
            got = f"{len(result)} samples" if isinstance(result, list) else type(result).__name__
            raise DataError(
                f"--custom-generate-function-path {name_of(self.function)} returned {got} for a group of {len(group)}; "
                "it must return a list with one entry per sample"
            )
        return result

    async def _call(self, *arguments: Any, **kwargs: Any) -> Any:
        limit = asyncio.timeout(seconds := self.args.custom_generate_timeout)
        try:
            async with limit:
                return await call_user(self.function, self.args, *arguments, **kwargs)
        except TimeoutError:
            if not limit.expired():  # raised by the function itself
                raise
            raise TimeoutError(
                f"it did not return within {seconds:g} s: fix it, or raise --custom-generate-timeout (seconds per call)"
            ) from None

    async def whole_group(self, state: Any, group: list[Any], params: dict[str, Any], evaluation: bool) -> list[Any]:
        """Generate a group with one call, apply the sample hooks, and score it unless the group is scored together."""
        args = self.args
        # Samples that the data source returned as finished are not generated again.
        unfinished = [s for s in iter_samples(group) if s.status not in FINISHED and not is_given_up(s)]
        if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
            mask_older_tokens(list(unfinished))
        made: list[Any] | None = None
        async with state.slots.several(len(unfinished)):
            if is_ending(state):
                return group
            on_begin.get()()
            what = f"--custom-generate-function-path {name_of(self.function)}"
            for attempt in Attempts(unfinished, retries=args.max_sample_retries, what=what) if unfinished else ():
                with attempt:
                    # Copies: a function may change its arguments, and the next attempt needs the originals.
                    result = await self.of_group(list(unfinished), dict(params), evaluation)
                    complete_results(args, state, result, unfinished, params)
                    # Only now: complete_results raises for an aborted request, whose result is discarded.
                    made = result
        if made is not None:
            made = await apply_rollout_sample_hooks(args, made, evaluation=evaluation)
            group = _put_in(group, dict(zip(map(id, unfinished), made, strict=True)))
        if not args.group_rm:
            await asyncio.gather(*(score(args, entry) for entry in group))
        return group


def _own(function: Callable[..., Any], sample: Sample) -> Sample:
    """The sample that ``function`` may change."""
    if not is_async(function):
        # A thread cannot be ended: a late function must not write into the sample of the next attempt.
        sample = traced_copy(sample)
    if sample.loss_mask is None and sample.response_length == 0:
        sample.loss_mask = []  # users write ``sample.loss_mask += [1] * n``
    return sample


def _put_in(group: list[Any], made: dict[int, Any]) -> list[Any]:
    """Replace the samples of ``group`` by the results made of them. The rows of one execution stay one flat list."""
    entries = []
    for entry in group:
        if isinstance(entry, Sample):
            entries.append(made.get(id(entry), entry))
        else:
            entries.append(list(iter_samples([made.get(id(sample), sample) for sample in iter_samples(entry)])))
    return entries


def complete_results(
    args: Any,
    state: Any,
    results: Sequence[Any],
    sources: Sequence[Sample],
    sampling_params: dict[str, Any],
) -> None:
    """Complete the result of each source in place, and cut the text of its stop token.

    Raises:
        RuntimeError: the engine aborted a request although the rollout continues. The sample is generated again, unless
            the function itself ended it: without a part in the loss, and with a reward.
    """
    for result, source in zip(results, sources, strict=True):
        complete(result, source, state.tokenizer)
        if not args.keep_stop_token_text:
            cut_stop_token(args.hf_checkpoint, result, sampling_params, state.tokenizer)
    if any(map(is_cut, iter_samples(list(results)))) and not expects_aborts(state):
        raise RuntimeError("the engine aborted the request although the rollout goes on")


def is_cut(sample: Sample) -> bool:
    """Whether an abort cut the sample. One that its function ended has no part in the loss, and a reward."""
    is_ended = sample.remove_sample and sample.reward is not None
    return sample.status is Sample.Status.ABORTED and not is_ended


def complete(result: Any, source: Sample, tokenizer: Any) -> None:
    """Fill in, in place, the fields that a custom function left out of the samples it made from ``source``."""
    siblings = list(iter_samples(result))
    for sample in siblings:
        if sample.metadata is None:
            sample.metadata = dict(source.metadata)
        # A sample that the function made has no trace. Its spans belong to the trace of its source.
        if source.trace is not None and sample.trace is None:
            sample.trace = source.trace
        sample.index = source.index if sample.index is None else sample.index
        sample.group_index = source.group_index if sample.group_index is None else sample.group_index
        # Rows of one execution share a rollout id. Without it each row would count as one rollout in the batch.
        if len(siblings) > 1 and sample.rollout_id is None:
            sample.rollout_id = source.rollout_id if source.rollout_id is not None else source.index
        if not sample.tokens and sample.response:
            _tokenize(sample, tokenizer)
        # :func:`_own` made an empty list. None means that all response tokens are trained.
        if not sample.loss_mask:
            sample.loss_mask = None
        _read_status(sample)
        if sample.status is Sample.Status.PENDING:
            sample.status = Sample.Status.COMPLETED


def samples_of(flag: str, function: Any, returned: Any) -> list[Sample]:
    """The samples that the user's rollout function of ``flag`` returned, in any nesting of lists."""
    try:
        samples = list(iter_samples(returned))
    except TypeError as error:
        raise DataError(f"{flag}: {name_of(function)} must return samples in lists: {error}") from None
    for sample in samples:
        _read_status(sample)
    return samples


def _read_status(sample: Sample) -> None:
    """Replace a status that a user's function set as text. Raises ValueError for a text that is not one."""
    if isinstance(sample.status, str):
        _warn_once(f"a status is the text {sample.status!r} instead of a Sample.Status")
        sample.status = Sample.Status(sample.status)


@functools.cache
def _warn_once(text: str) -> None:
    """Warn once per process: each sample has the same fault."""
    logger.warning(text)


def _tokenize(sample: Sample, tokenizer: Any) -> None:
    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = render_chat(tokenizer, prompt, tools=sample.metadata.get("tools"), add_generation_prompt=True)
    response = tokenizer.encode(sample.response, add_special_tokens=False)
    sample.tokens = [*tokenizer.encode(prompt, add_special_tokens=False), *response]
    sample.response_length = len(response)
    _warn_once(
        "a custom generate function gave text only. Its tokens were made from the text, and the engine's log-probs of "
        "them are unknown; Sample.append_response_tokens keeps both"
    )


_rollout_ids: dict[bool, int | None] = {False: None, True: None}
"""Whether it evaluates -> the id in this process. A rollout and an evaluation may run at the same time."""


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Called by the rollout manager before it generates."""
    _rollout_ids[False] = rollout_id


def set_evaluated_rollout_id(rollout_id: int | None) -> None:
    """Called by the rollout manager before it evaluates, possibly during a rollout."""
    _rollout_ids[True] = rollout_id


def current_rollout_id(evaluation: bool = False) -> int | None:
    own = _rollout_ids[evaluation]
    return _rollout_ids[False] if own is None else own  # such an evaluation belongs to the current rollout


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Apply every hook, in the order of the flags, to each sample in ``value``. The nesting is kept.

    Args:
        value: a sample or lists of them. Without hooks the same object is returned.
        kwargs: offered to the hooks. Each gets those that its signature accepts. ``rollout_id`` has a default.

    Raises:
        TypeError: a value that is not a sample or list, or a hook that returns neither a sample nor None.
    """
    paths = complete_args(args).rollout_sample_hook_path
    if not paths:
        return value
    kwargs.setdefault("rollout_id", current_rollout_id(bool(kwargs.get("evaluation"))))
    hooks = [load_function(path) for path in paths]

    async def apply(value: Any) -> Any:
        if isinstance(value, list):
            return [await apply(item) for item in value]
        if not isinstance(value, Sample):
            raise TypeError(f"sample hooks apply to a Sample or lists of them, got {type(value).__name__}")
        for hook in hooks:
            result = await call_user(hook, args, value, **accepted_kwargs(hook, kwargs))
            if result is None:
                continue
            if not isinstance(result, Sample):
                got = type(result).__name__
                raise TypeError(f"--rollout-sample-hook-path {name_of(hook)}: expected Sample or None, got {got}")
            value = result
        return value

    return await apply(value)
