"""The default rollout: prompts go through the router to the engines, return as samples, and get their reward.

    generate_rollout            synchronous; default of --rollout-function-path      ┐ one loop per process
      generate_rollout_async    over-sampling, dynamic filter (collect.py)           │ (slime.utils.async_utils)
      eval_rollout              all evaluation sets (evaluate.py)                    │
        generate_and_rm_group   the n samples of a prompt, then their group reward   │
          generate_and_rm       one sample: generate, hooks, reward                  │
            generate            one request                                          ┘

Waits: a sample waits for a slot (--sglang-server-concurrency per engine), then for its engine
(--rollout-request-timeout) or the user's function (--custom-generate-timeout), then for its reward (--rm-timeout).

Run by the rollout manager. Plugins and tests may replace the functions of this module, because calls look them up here.
Knows neither trainer nor Ray.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from uuid import uuid4

from slime.data.processing import has_media, load_processor, load_tokenizer
from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.hooks import can_be_called, load_function, takes_group
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_function, trace_span
from slime.rollout import collect
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, complete_args
from slime.rollout.custom_generate import (
    FINISHED,
    GenerateFunction,
    apply_rollout_sample_hooks,
    complete_results,
    evaluates,
    is_ending,
    on_begin,
    until_finished,
)
from slime.rollout.direct_engines import DirectEngines, with_packed_experts
from slime.rollout.engine_request import (
    EngineRequest,
    append_reply,
    build_request,
    check_reply,
    prepare_prompt_ids,
    send,
    send_options,
    train_sampling_params,
)
from slime.rollout.eval_config import EvalDatasetConfig
from slime.rollout.evaluate import EVAL_PROMPT_DATASET, evaluate
from slime.rollout.failures import Attempts, is_given_up
from slime.rollout.prompt_history import DraftHistory, LongTail
from slime.rollout.rm_hub import score, score_group
from slime.utils.async_utils import Slots, call_in_thread, run
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

_TAIL, _DRAFTS = LongTail(), DraftHistory()
_prepare_prompt_ids = prepare_prompt_ids  # the name that plugins import


class GenerateState(metaclass=SingletonMeta):
    """The state that all requests of this process share.

    Attributes:
        tokenizer: of ``--hf-checkpoint``.
        processor: of ``--hf-checkpoint``, loaded on first use; None for a checkpoint without one.
        sampling_params: of training requests. Copy them before a change.
        pendings: tasks of the running groups.
        remaining_batch_size: groups submitted since the last reset.
        aborted: the rollout is ending, and no new request is sent.
        slots: limits the samples that run at the same time.
        engines: the engines of the default router, for requests that go past it.
        requeues_aborted: samples whose request an engine aborted are returned unchanged, not generated again.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = complete_args(args)
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.slots = Slots(max(1, args.sglang_server_concurrency * get_rollout_num_engines(args)))
        self.sampling_params = train_sampling_params(args)
        self.group_sampling_seeds: list[int] | None = None
        if args.sglang_enable_deterministic_inference:
            self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.dp_counts = [0] * (args.sglang_dp_size or 1)
        self.dp_rank = 0
        self.requeues_aborted = False
        # During an evaluation the end of a rollout aborts only the requests in ``training``.
        self.num_evaluations = 0
        self.training: dict[EngineRequest, None] = {}  # in the order in which they were sent
        self.reset()

    @functools.cached_property
    def processor(self) -> Any:
        return load_processor(self.args.hf_checkpoint, trust_remote_code=True)

    @functools.cached_property
    def engines(self) -> DirectEngines:
        return DirectEngines(get_model_url(self.args, "default", ""))

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """One slot per running sample, of the running event loop."""
        return self.slots.semaphore

    @property
    def is_ending(self) -> bool:
        return is_ending(self)

    @contextmanager
    def waiting_for(self, request: EngineRequest) -> Iterator[None]:
        """Let the end of the rollout abort the request during the block, unless it belongs to an evaluation."""
        if not evaluates.get():
            self.training[request] = None
        try:
            yield
        finally:
            self.training.pop(request, None)

    def grow(self) -> None:
        """Let more samples run at the same time if engines have joined."""
        self.slots.grow(self.args.sglang_server_concurrency * get_rollout_num_engines(self.args))

    def reset(self) -> None:
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.aborted = False

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Count a request on one of the least busy data-parallel ranks of the engines."""
        least = min(self.dp_counts)
        rank = random.SystemRandom().choice([i for i, count in enumerate(self.dp_counts) if count == least])
        self.dp_counts[rank] += 1
        self.dp_rank = rank
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def submit_generate_tasks(self, groups: list[SampleGroup]) -> list[asyncio.Task[Any]]:
        tasks = [
            asyncio.create_task(
                generate_and_rm_group(self.args, group, sampling_params=self.sampling_params.copy(), evaluation=False)
            )
            for group in groups
        ]
        self.pendings.update(tasks)
        self.remaining_batch_size += len(groups)
        return tasks


_AT_REST = {
    "tokenizer": None,
    "group_sampling_seeds": None,
    "requeues_aborted": False,
    "waiting_for": nullcontext,
    "dp_rank_context": nullcontext,
}


def _state(args: Namespace) -> Any:
    state = GenerateState(args)
    # A state that a user's test made by hand lacks some attributes.
    for name, value in _AT_REST.items():
        if not hasattr(state, name):
            setattr(state, name, value)
    return state


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """The address of a model's router; of the default router, with a warning, for an unknown name."""
    routers = complete_args(args).sglang_model_routers or {}
    if routers and model_name not in (*routers, "default"):
        _warn_of_unknown_model(model_name, ", ".join(routers))
    host, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{host}:{port}{endpoint}"


# Once per name. Without a warning a reward would ask the wrong model unnoticed.
@functools.cache
def _warn_of_unknown_model(name: str, known: str) -> None:
    logger.warning("get_model_url: the run serves no model %r but %s; the default router is asked instead", name, known)


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate the response of one sample, or the rest of it.

    Tokens and log-probs are those of the engine, without a second tokenization. ``sampling_params`` stays unchanged.

    Raises:
        DataError: a prompt that cannot be sent.
        EngineError: the request was refused, or no engine answered.
        RequestExpired: ``--rollout-request-timeout`` passed.
    """
    request = await prepare_request(args, sample, sampling_params)
    if request is None:
        return sample
    state = _state(args)
    attrs = {"max_new_tokens": sampling_params["max_new_tokens"]}
    with trace_span(sample, "sglang_generate", attrs=attrs) as span, state.waiting_for(request):
        reply = await send(request, post, **send_options(args, request, sample))
    output = check_reply(request, sample, await with_packed_experts(reply))
    span.update(build_sglang_meta_trace_attrs(output["meta_info"]))
    append_reply(args, sample, sampling_params, state.tokenizer, output)
    return sample


async def prepare_request(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> EngineRequest | None:
    """The request for the response of a sample, or for the rest of it. Images are processed in a thread."""
    state = _state(complete_args(args))
    is_trained = not evaluates.get()

    def prepare(processor: Any) -> EngineRequest | None:
        ids = _prepare_prompt_ids(sample, state.tokenizer, processor)
        return build_request(args, sample, sampling_params, ids, is_trained=is_trained)

    with_media = has_media(sample.multimodal_inputs)
    request = await call_in_thread(lambda: prepare(state.processor)) if with_media else prepare(None)
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
    complete_args(args)
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
        collect.mask_older_tokens(sample)
    if isinstance(sample, list):  # the rows of one execution, returned by the data source
        results = [await generate_and_rm(args, item, sampling_params, evaluation) for item in sample]
        return list(iter_samples(results))
    evaluates.set(evaluation)
    if is_given_up(sample):
        return sample
    if sample.status in FINISHED:
        if not args.group_rm:
            await score(args, sample)  # the last rollout ended before its reward was known
        return sample
    state = _state(args)
    async with state.semaphore:
        # The rollout may have ended while the sample waited for a slot.
        if is_ending(state):
            sample.status = Sample.Status.ABORTED
            return sample
        on_begin.get()()
        with state.dp_rank_context():
            result = await _generate_one(args, state, sample, sampling_params, evaluation)
    scored: Sample | list[Sample] = await apply_rollout_sample_hooks(args, result, evaluation=evaluation)
    if not args.group_rm:
        await score(args, scored)
    _TAIL.note_sample(counts=not evaluation and not is_ending(state))
    return scored


async def _generate_one(
    args: Namespace, state: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    path = sample.generate_function_path or args.custom_generate_function_path
    what = "generate" if path is None else f"--custom-generate-function-path {path}"
    for attempt in Attempts([sample], retries=args.max_sample_retries, what=what):
        with attempt:
            function = None if path is None else _load(path, "generate")
            call: Callable[..., Awaitable[Sample | list[Sample]]] = functools.partial(generate, args)
            if function is not None:
                call = functools.partial(GenerateFunction(args, function).of_one, evaluation=evaluation)
            result = await until_finished(call, function, state, sample, sampling_params)
            complete_results(args, state, [result], [sample], sampling_params)
            return result
    return sample


@trace_function(
    "generate_and_rm_group", target="group", attrs_getter=lambda args, group, *_, **__: {"group_size": len(group)}
)
async def generate_and_rm_group(
    args: Namespace, group: list[Any], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate and score the samples of one prompt. An entry becomes a list if its execution made several samples."""
    evaluates.set(evaluation)
    state = _state(complete_args(args))
    if is_ending(state):
        return group
    for sample in iter_samples(group):
        sample.session_id = sample.session_id or str(uuid4())
    path = next(iter_samples(group)).generate_function_path or args.custom_generate_function_path
    function = None if path is None else _load(path, "generate")
    if function is not None and takes_group(function):
        result = await GenerateFunction(args, function).whole_group(state, group, sampling_params, evaluation)
    else:
        tasks = [
            asyncio.create_task(generate_and_rm(args, sample, seeded(state, sampling_params, i), evaluation=evaluation))
            for i, sample in enumerate(group)
        ]
        result = await collect.gather(tasks)
    if args.group_rm and not is_ending(state):
        await score_group(args, result)
    return result


def _load(path: str, *role: Any) -> Any:
    # A test may replace the loader by one that takes the path alone.
    return load_function(path, *(role if can_be_called(load_function, ("path", "role")) else ()))


def seeded(state: Any, sampling_params: dict[str, Any], position: int) -> dict[str, Any]:
    params = sampling_params.copy()
    if state.group_sampling_seeds:
        # Different seeds: with equal seeds deterministic inference repeats the same response.
        params["sampling_seed"] = state.args.rollout_seed + position
    return params


async def abort(args: Namespace, rollout_id: int) -> list[SampleGroup]:
    """End all running groups: engines drop their requests, and the remaining tasks are cancelled.

    Never raises, because it also runs after the death of an engine or the router.

    Returns:
        With ``--partial-rollout`` the aborted groups with their unfinished responses, else none.
    """
    state = GenerateState(complete_args(args))
    state.aborted = True
    # A tool call or a reward may be under way, and more requests after it. Responses that are kept may finish the step.
    patience_s = args.rm_timeout if args.partial_rollout else None
    # Aborting all requests would also end those of the evaluation.
    requests = state.training if state.num_evaluations else None
    groups = await collect.end_tasks(
        state.pendings, get_model_url(args, "default", "/workers"), patience_s, requests=requests
    )
    collect.note_start(groups, rollout_id)
    return groups if args.partial_rollout else []


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source_get_samples: Callable[[int], Any]
) -> tuple[RolloutFnTrainOutput, list[SampleGroup]]:
    """One training batch, and the prompts that were fetched for it but are not in it.

    Args:
        data_source_get_samples: ``get_samples`` of the data source. The hook for all samples receives its owner.
    """
    if not complete_args(args).rollout_global_dataset:
        raise DataError("the default rollout draws from the data source: drop --disable-rollout-global-dataset")
    state = GenerateState(args)
    hooks = collect.BatchHooks(args, (path := args.dynamic_sampling_filter_path) and _load(path, "filter"))
    plan = collect.BatchPlan(
        target=args.rollout_batch_size,
        group_size=args.n_samples_per_prompt,
        chunk=args.over_sampling_batch_size or args.rollout_batch_size,
        label=f"rollout {rollout_id}",
        keeps_responses=args.partial_rollout,
        max_failed_share=args.max_failed_share,
    )
    try:
        collected = await collect.collect(
            plan,
            fetch=_TAIL.begin(data_source_get_samples, longest_first=args.rollout_longest_first),
            submit=_DRAFTS.begin(args, state.submit_generate_tasks),
            judge=hooks.judge,
            stop=functools.partial(abort, args, rollout_id),
            workers_url=get_model_url(args, "default", "/workers"),
            requests=state.training,
        )
        collect.note_start(collected.left_over, rollout_id)
    finally:
        state.reset()
    collected.metrics |= _TAIL.end(collected.all_groups)
    _DRAFTS.end(collected.all_groups)
    collect.log_sample(next(iter_samples(collected.groups)), f"rollout {rollout_id}, first sample")
    owner = getattr(data_source_get_samples, "__self__", data_source_get_samples)
    await hooks.finish(collected.groups, collected.all_groups, owner)
    return RolloutFnTrainOutput(samples=collected.groups, metrics=dict(collected.metrics)), collected.left_over


async def eval_rollout(args: Namespace, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[SampleGroup]]:
    """Evaluate on every set of ``args.eval_datasets``. The second result is always empty."""
    return RolloutFnEvalOutput(data=await _evaluate_sets(args, args.eval_datasets or [])), []


async def eval_rollout_single_dataset(
    args: Namespace, rollout_id: int, dataset_cfg: EvalDatasetConfig
) -> dict[str, dict[str, Any]]:
    """Evaluate on one set: ``{its name: {"rewards", "truncated", "samples"}}``."""
    return await _evaluate_sets(args, [dataset_cfg])


async def _evaluate_sets(args: Namespace, configs: Sequence[EvalDatasetConfig]) -> dict[str, dict[str, Any]]:
    state = GenerateState(complete_args(args))
    state.num_evaluations += 1
    try:
        return await evaluate(args, configs, generate_and_rm_group)
    finally:
        state.num_evaluations -= 1


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Make one training batch, or evaluate. The default of ``--rollout-function-path``."""
    init_http_client(complete_args(args))
    stall_s = 60.0 + 2 * args.rm_timeout  # an async reward that blocks the loop cannot be timed out
    if evaluation:
        return run(eval_rollout(args, rollout_id), stall_s)[0]
    output, left_over = run(generate_rollout_async(args, rollout_id, data_source.get_samples), stall_s)
    if left_over:
        try:
            data_source.add_samples(left_over)
        except (AttributeError, RuntimeError) as error:  # a source without a buffer
            logger.warning("%d prompts that were fetched but not used are lost: %s", len(left_over), error)
    return output
