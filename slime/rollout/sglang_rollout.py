"""The default rollout: prompts go through the router to the engines, come back as samples, and get their reward.

    generate_rollout            sync; what --rollout-function-path names          ┐ one loop for the process
      generate_rollout_async    over-sampling, dynamic filter (collect.py)        │ (slime.utils.async_utils)
      eval_rollout              all evaluation sets (evaluate.py)                 │
        generate_and_rm_group   the n samples of a prompt, then their group reward│
          generate_and_rm       one sample: generate, hooks, reward               │
            generate            one request                                       ┘

    who waits for whom: a sample waits for a place (--sglang-server-concurrency per engine), then for its engine
    (--rollout-request-timeout) or for the user's function (--custom-generate-timeout), then for its reward
    (--rm-timeout).

Run by the rollout manager. Functions are looked up in this module when they are called, so plugins and tests may
replace them. Knows no trainer and no Ray.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from uuid import uuid4

from slime.data.chat import load_tokenizer
from slime.data.media import has_media, load_processor
from slime.data.prompts import Dataset
from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.data.sampling_mask import sampled_tokens
from slime.hooks.load import can_be_called, load_function
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_function, trace_span
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.collect import (
    call_batch_hooks,
    collect,
    end_tasks,
    gather,
    log_sample,
    mask_older_tokens,
    note_start,
)
from slime.rollout.custom_generate import call_generate, complete, generate_whole_group, refuse_stray_abort, takes_group
from slime.rollout.direct_engines import DirectEngines
from slime.rollout.engine_request import (
    EngineRequest,
    build_request,
    check_reply,
    cut_stop_token,
    prepare_prompt_ids,
    train_sampling_params,
)
from slime.rollout.eval_config import EvalDatasetConfig
from slime.rollout.evaluate import EvalDatasets, evaluate
from slime.rollout.failures import generate_with_retries, is_given_up, request_retries
from slime.rollout.rm_hub.scoring import score, score_group
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.settings import is_ending, setting
from slime.utils.async_utils import Places, call_in_thread, run
from slime.utils.errors import DataError
from slime.utils.http_utils import get_rollout_num_engines, init_http_client, post
from slime.utils.misc import SingletonMeta

__all__ = [
    "EVAL_PROMPT_DATASET",
    "GenerateState",
    "abort",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]

logger = logging.getLogger(__name__)

_prepare_prompt_ids = prepare_prompt_ids  # the name that plugins import
EVAL_PROMPT_DATASET: dict[Any, Dataset] = {}
"""Prompts of the evaluation sets that were read; plugins' evaluation functions keep theirs here as well."""

_evaluates: ContextVar[bool] = ContextVar("evaluates", default=False)
"""Whether the running task generates for an evaluation; tasks that it starts inherit it."""

_FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


class GenerateState(metaclass=SingletonMeta):
    """What all requests of this process share.

    Attributes:
        tokenizer: of ``--hf-checkpoint``.
        processor: of ``--hf-checkpoint``, loaded when it is first asked for; None where there is none.
        sampling_params: of training requests; copy before changing.
        pendings: tasks of the running groups.
        remaining_batch_size: groups submitted since the last reset.
        aborted: the rollout is ending; nothing new is sent.
        engines: those behind the default router, for requests that go past it.
        requeues_aborted: samples whose request an engine aborted are returned as they are, not generated again.
        num_evaluations: those that run; with one, the end of a rollout aborts only the requests in ``training``.
        training: requests of the rollout that wait for their answer.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.places = Places(max(1, args.sglang_server_concurrency * get_rollout_num_engines(args)))
        self.sampling_params = train_sampling_params(args)
        self.group_sampling_seeds: list[int] | None = None
        if getattr(args, "sglang_enable_deterministic_inference", False):
            self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.dp_counts = [0] * (getattr(args, "sglang_dp_size", None) or 1)
        self.dp_rank = 0
        self.eval_datasets = EvalDatasets(args, self.tokenizer, lambda: self.processor, EVAL_PROMPT_DATASET)
        self.requeues_aborted = False
        self.num_evaluations = 0
        self.training: set[EngineRequest] = set()
        self.reset()

    @functools.cached_property
    def processor(self) -> Any:
        return load_processor(self.args.hf_checkpoint, trust_remote_code=True)

    @functools.cached_property
    def engines(self) -> DirectEngines:
        return DirectEngines(get_model_url(self.args, "default", ""))

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """One place per running sample, of the running event loop."""
        return self.places.semaphore

    @property
    def is_ending(self) -> bool:
        """Whether the rollout that this task works for is over; an evaluation is not ended by a rollout."""
        return self.aborted and not _evaluates.get()

    @contextmanager
    def waiting_for(self, request: EngineRequest) -> Iterator[None]:
        """While the block runs the end of the rollout aborts the request, unless it belongs to an evaluation."""
        if not _evaluates.get():
            self.training.add(request)
        try:
            yield
        finally:
            self.training.discard(request)

    def reset(self) -> None:
        """Ready for the next rollout."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.aborted = False

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Count a request on one of the least busy data-parallel ranks of the engines."""
        least = min(self.dp_counts)
        rank = random.choice([i for i, count in enumerate(self.dp_counts) if count == least])
        self.dp_counts[rank] += 1
        self.dp_rank = rank
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def submit_generate_tasks(self, groups: list[SampleGroup]) -> list[asyncio.Task[Any]]:
        """Start one task per group."""
        tasks = [
            asyncio.create_task(
                generate_and_rm_group(self.args, group, sampling_params=self.sampling_params.copy(), evaluation=False)
            )
            for group in groups
        ]
        self.pendings.update(tasks)
        self.remaining_batch_size += len(groups)
        return tasks


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """Address of a model's router; of the default router, with a warning, when there is none by that name."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    if routers and model_name not in (*routers, "default"):
        _warn_of_unknown_model(model_name, ", ".join(routers))
    host, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{host}:{port}{endpoint}"


@functools.cache
def _warn_of_unknown_model(name: str, known: str) -> None:
    """Once per name: a reward that asks the wrong model would go unnoticed."""
    logger.warning("get_model_url: the run serves no model %r but %s; the default router is asked instead", name, known)


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate the response of one sample, or the rest of it.

    Tokens and log-probs are those the engine sampled; nothing is tokenized again. ``sampling_params`` stays unchanged.

    Raises:
        DataError: a prompt that cannot be sent.
        EngineError: the request was refused, or no engine answered.
        DeadlineExceeded: ``--rollout-request-timeout`` passed.
    """
    request = await prepare_request(args, sample, sampling_params)
    if request is None:
        return sample
    attrs = {"max_new_tokens": sampling_params["max_new_tokens"]}
    state = GenerateState(args)
    waiting = getattr(state, "waiting_for", nullcontext)(request)
    with trace_span(sample, "sglang_generate", attrs=attrs) as span, waiting:
        reply = await post(
            request.url,
            request.new_attempt,
            max_retries=request_retries(args),
            headers=request.headers,
            timeout_s=setting(args, "rollout_request_timeout"),
        )
    output = check_reply(request, sample, reply)
    meta = output["meta_info"]
    span.update(build_sglang_meta_trace_attrs(meta))
    tokens, log_probs = sampled_tokens(meta)
    sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, text=output["text"], meta_info=meta)
    cut_stop_token(args, sample, sampling_params, state.tokenizer, meta.get("finish_reason"))
    return sample


async def prepare_request(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> EngineRequest | None:
    """What generates the response of a sample, or the rest of it. Images are worked on in a thread."""
    state = GenerateState(args)
    is_trained = not _evaluates.get()

    def prepare(processor: Any) -> EngineRequest | None:
        ids = _prepare_prompt_ids(sample, state.tokenizer, processor)
        return build_request(args, sample, sampling_params, ids, is_trained=is_trained)

    if has_media(sample.multimodal_inputs):
        request = await call_in_thread(lambda: prepare(state.processor))
    else:
        request = prepare(None)
    if request is not None and request.goes_past_the_router:
        return replace(request, url=state.engines.choose(sample.session_id))
    return request


@trace_function("generate_and_rm", target="sample")
async def generate_and_rm(
    args: Namespace, sample: Sample | list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate one sample, apply the sample hooks, and score it unless the group is scored together.

    A custom generate function may return several samples for one. Rewards that it set are kept.
    """
    if setting(args, "partial_rollout") and setting(args, "mask_offpolicy_in_partial_rollout"):
        mask_older_tokens(sample)
    if isinstance(sample, list):
        results = [await generate_and_rm(args, item, sampling_params, evaluation) for item in sample]
        return list(iter_samples(results))  # the rows of one execution, back from the data source
    _evaluates.set(evaluation)
    if is_given_up(sample):
        return sample
    if sample.status in _FINISHED:
        if not setting(args, "group_rm"):
            await score(args, sample)  # the rollout ended before its reward was there
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if is_ending(state):
            sample.status = Sample.Status.ABORTED
            return sample
        with getattr(state, "dp_rank_context", nullcontext)():
            result = await _generate_one(args, state, sample, sampling_params, evaluation)
    scored: Sample | list[Sample] = await apply_rollout_sample_hooks(args, result, evaluation=evaluation)
    if not setting(args, "group_rm"):
        await score(args, scored)
    return scored


async def _generate_one(
    args: Namespace, state: GenerateState, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Any:
    path = sample.generate_function_path or setting(args, "custom_generate_function_path")

    async def attempt() -> Any:
        if path is None:
            result: Any = await generate(args, sample, dict(sampling_params))
        else:
            function = _load(path, "generate")
            result = await call_generate(function, args, sample, dict(sampling_params), evaluation)
        complete(result, sample, lambda: state.tokenizer)
        cut_stop_token(args, result, sampling_params, getattr(state, "tokenizer", None))
        refuse_stray_abort(state, result, evaluation)
        return result

    what = "generate" if path is None else f"--custom-generate-function-path {path}"
    return (
        await generate_with_retries(attempt, [sample], retries=setting(args, "max_sample_retries"), what=what) or sample
    )


@trace_function(
    "generate_and_rm_group", target="group", attrs_getter=lambda args, group, *_, **__: {"group_size": len(group)}
)
async def generate_and_rm_group(
    args: Namespace, group: list[Any], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate and score the samples of one prompt; an entry becomes a list where its execution made several."""
    _evaluates.set(evaluation)
    state = GenerateState(args)
    if is_ending(state):
        return group
    for sample in iter_samples(group):
        sample.session_id = sample.session_id or str(uuid4())
    path = next(iter_samples(group)).generate_function_path or setting(args, "custom_generate_function_path")
    function = None if path is None else _load(path, "generate")
    if function is not None and takes_group(function):
        result = await generate_whole_group(args, state, function, group, sampling_params, evaluation)
    else:
        tasks = [
            asyncio.create_task(
                generate_and_rm(args, sample, _seeded(state, sampling_params, i), evaluation=evaluation)
            )
            for i, sample in enumerate(group)
        ]
        result = await gather(tasks)
    if setting(args, "group_rm") and not is_ending(state):
        await score_group(args, result)
    return result


def _load(path: str, *role: Any) -> Any:
    """A loader that a test put here may take the path alone."""
    return load_function(path, *(role if can_be_called(load_function, ("path", "role")) else ()))


def _seeded(state: GenerateState, sampling_params: dict[str, Any], position: int) -> dict[str, Any]:
    params = dict(sampling_params)
    if getattr(state, "group_sampling_seeds", None):
        params["sampling_seed"] = state.args.rollout_seed + position
    return params


async def abort(args: Namespace, rollout_id: int) -> list[SampleGroup]:
    """End all running groups: engines drop their requests; what does not end by that is cancelled.

    Returns:
        With ``--partial-rollout`` the groups that ended by it, with what they have so far; else none.

    Never raises: it also runs after an engine or the router died.
    """
    state = GenerateState(args)
    state.aborted = True
    keeps_responses = setting(args, "partial_rollout")
    # A tool call or a reward may be under way, and more requests behind it. What is kept has time to end in order.
    patience_s = setting(args, "rm_timeout") if keeps_responses else None
    groups = await end_tasks(
        state.pendings,
        get_model_url(args, "default", "/workers"),
        patience_s,
        requests=state.training if state.num_evaluations else None,
    )
    note_start(groups, rollout_id)
    return groups if keeps_responses else []


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source_get_samples: Callable[[int], Any]
) -> tuple[RolloutFnTrainOutput, list[SampleGroup]]:
    """One training batch, and the prompts that were fetched for it but are not in it.

    Args:
        data_source_get_samples: ``get_samples`` of the data source; the hook for all samples receives its owner.
    """
    if not args.rollout_global_dataset:
        raise DataError("the default rollout draws from the data source: drop --disable-rollout-global-dataset")
    state = GenerateState(args)
    filter_path = setting(args, "dynamic_sampling_filter_path")

    async def stop() -> None:
        await abort(args, rollout_id)

    try:
        collected = await collect(
            args=args,
            target=args.rollout_batch_size,
            chunk=setting(args, "over_sampling_batch_size") or args.rollout_batch_size,
            group_size=args.n_samples_per_prompt,
            fetch=data_source_get_samples,
            submit=state.submit_generate_tasks,
            stop=stop,
            dynamic_filter=None if filter_path is None else _load(filter_path, "filter"),
            label=f"rollout {rollout_id}",
            keeps_responses=setting(args, "partial_rollout"),
            max_failed_share=setting(args, "max_failed_share"),
        )
        note_start(collected.left_over, rollout_id)
        metrics = dict(collected.metrics)
    finally:
        state.reset()
    log_sample(next(iter_samples(collected.groups)), f"rollout {rollout_id}, first sample")
    owner = getattr(data_source_get_samples, "__self__", data_source_get_samples)
    await call_batch_hooks(args, collected.groups, collected.all_groups, owner)
    return RolloutFnTrainOutput(samples=collected.groups, metrics=metrics), collected.left_over


async def eval_rollout(args: Namespace, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[SampleGroup]]:
    """Evaluate on every set of ``args.eval_datasets``. The second result is always empty."""
    return RolloutFnEvalOutput(data=await _evaluate_sets(args, args.eval_datasets or [])), []


async def eval_rollout_single_dataset(
    args: Namespace, rollout_id: int, dataset_cfg: EvalDatasetConfig
) -> dict[str, dict[str, Any]]:
    """Evaluate on one set: ``{its name: {"rewards", "truncated", "samples"}}``."""
    return await _evaluate_sets(args, [dataset_cfg])


async def _evaluate_sets(args: Namespace, configs: Sequence[EvalDatasetConfig]) -> dict[str, dict[str, Any]]:
    state = GenerateState(args)
    sets = [(config, await call_in_thread(state.eval_datasets.of, config)) for config in configs]
    state.num_evaluations += 1
    try:
        return await evaluate(args, sets, generate_and_rm_group)
    finally:
        state.num_evaluations -= 1


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Make one training batch, or evaluate. The default of ``--rollout-function-path``."""
    init_http_client(args)
    stall_s = 60.0 + 2 * setting(args, "rm_timeout")  # an async reward that blocks the loop cannot be timed out
    if evaluation:
        return run(eval_rollout(args, rollout_id), stall_s)[0]
    output, left_over = run(generate_rollout_async(args, rollout_id, data_source.get_samples), stall_s)
    if left_over:
        try:
            data_source.add_samples(left_over)
        except (AttributeError, RuntimeError) as error:  # a source without a buffer
            logger.warning("%d prompts that were fetched but not used are lost: %s", len(left_over), error)
    return output
