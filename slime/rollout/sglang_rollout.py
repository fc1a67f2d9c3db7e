"""The default rollout: prompts go through the router to the engines, come back as samples, and get their reward.

    generate_rollout            sync; what --rollout-function-path names          ┐ one loop for the process
      generate_rollout_async    over-sampling, dynamic filter (collect.py)        │ (slime.utils.async_utils)
      eval_rollout              all evaluation sets (evaluate.py)                 │
        generate_and_rm_group   the n samples of a prompt, then their group reward│
          generate_and_rm       one sample: generate, hooks, reward               │
            generate            one request                                       ┘

    who waits for whom: a sample waits for a place (--sglang-server-concurrency per engine), then for its engine
    (--rollout-request-timeout), then for its reward (--rm-timeout).

Run by the rollout manager. Functions are looked up in this module when they are called, so plugins and tests may
replace them. Knows no trainer and no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from slime.data.chat import load_tokenizer
from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.hooks.load import load_function
from slime.rollout.abort_requests import end_tasks, note_start
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.collect import collect, log_sample
from slime.rollout.custom_generate import call_generate, call_group_generate, complete, takes_group
from slime.rollout.engine_request import build_request
from slime.rollout.evaluate import evaluate, load_eval_dataset
from slime.rollout.failures import generate_with_retries, request_retries
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.sampling import prepare_prompt_ids, train_sampling_params
from slime.rollout.settings import setting
from slime.utils.async_utils import run
from slime.utils.errors import DataError, EngineError
from slime.utils.http_utils import get_rollout_num_engines, init_http_client, post
from slime.utils.misc import SingletonMeta

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]

logger = logging.getLogger(__name__)

_prepare_prompt_ids = prepare_prompt_ids  # the name that plugins import

_FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


@dataclass(frozen=True)
class _Places:
    semaphore: asyncio.Semaphore
    taking: asyncio.Lock


class GenerateState(metaclass=SingletonMeta):
    """What all requests of this process share.

    Attributes:
        tokenizer: of ``--hf-checkpoint``.
        processor: None; images are not supported yet.
        sampling_params: of training requests; copy before changing.
        pendings: tasks of the running groups.
        remaining_batch_size: groups submitted since the last reset.
        aborted: the rollout is ending; nothing new is sent.
        requeues_aborted: samples whose request an engine aborted are returned as they are, not generated again.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.processor = None
        self.num_places = max(1, args.sglang_server_concurrency * get_rollout_num_engines(args))
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Places] = weakref.WeakKeyDictionary()
        self.sampling_params = train_sampling_params(args)
        self.group_sampling_seeds: list[int] | None = None
        if getattr(args, "sglang_enable_deterministic_inference", False):
            self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.dp_counts = [0] * (getattr(args, "sglang_dp_size", None) or 1)
        self.dp_rank = 0
        self.eval_datasets: dict[Any, Any] = {}
        self.requeues_aborted = False
        self.reset()

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """One place per running sample. Each event loop has its own: a semaphore belongs to the loop it waits on."""
        return self._places().semaphore

    def _places(self) -> _Places:
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            self._by_loop[loop] = _Places(asyncio.Semaphore(self.num_places), asyncio.Lock())
        return self._by_loop[loop]

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

    @asynccontextmanager
    async def places_of_a_group(self, count: int) -> AsyncIterator[None]:
        """Hold a place per sample. One group at a time takes places, or two could wait for each other's."""
        places, taken = self._places(), 0
        try:
            async with places.taking:
                while taken < min(count, self.num_places):
                    await places.semaphore.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                places.semaphore.release()

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
    """Address of a model's router; of the default router when there is none by that name."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    host, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{host}:{port}{endpoint}"


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate the response of one sample, or the rest of it.

    Tokens and log-probs are those the engine sampled; nothing is tokenized again. ``sampling_params`` stays unchanged.

    Raises:
        DataError: a prompt that cannot be sent.
        EngineError: the request was refused, or no engine answered.
        DeadlineExceeded: ``--rollout-request-timeout`` passed.
    """
    state = GenerateState(args)
    ids = _prepare_prompt_ids(sample, state.tokenizer, state.processor)
    request = build_request(args, sample, sampling_params, ids)
    if request is None:
        return sample
    output = await post(
        request.url,
        request.new_attempt,
        max_retries=request_retries(args),
        headers=request.headers,
        timeout_s=setting(args, "rollout_request_timeout"),
    )
    if not isinstance(output, dict) or "meta_info" not in output:
        raise EngineError(f"the reply for sample {sample.index} is not that of an SGLang server: {str(output)[:300]}")
    meta = output["meta_info"]
    sampled = meta.get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in sampled],
        log_probs=[item[0] for item in sampled],
        text=output["text"],
        meta_info=meta,
    )
    return sample


async def generate_and_rm(
    args: Namespace, sample: Sample | list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate one sample, apply the sample hooks, and score it unless the group is scored together.

    A custom generate function may return several samples for one. Rewards that it set are kept.
    """
    if setting(args, "partial_rollout") and setting(args, "mask_offpolicy_in_partial_rollout"):
        _mask_older_tokens(sample)
    if isinstance(sample, list):
        results = [await generate_and_rm(args, item, sampling_params, evaluation) for item in sample]
        return list(iter_samples(results))  # the rows of one execution, back from the data source
    if sample.status in _FINISHED:
        if sample.reward is None and not setting(args, "group_rm"):
            raise DataError(f"sample {sample.index} came back from the data source finished, but without a reward")
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        with state.dp_rank_context():
            result = await _generate_one(args, state, sample, sampling_params, evaluation)
    scored: Sample | list[Sample] = await apply_rollout_sample_hooks(args, result, evaluation=evaluation)
    if not setting(args, "group_rm"):
        await _score(args, scored)
    return scored


def _mask_older_tokens(sample: Sample | list[Sample]) -> None:
    """Tokens from earlier rollouts came from older weights: they stay in the context but are not trained on."""
    for item in iter_samples(sample):
        if item.response_length > 0:
            item.loss_mask = [0] * item.response_length


async def _generate_one(
    args: Namespace, state: GenerateState, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Any:
    path = sample.generate_function_path or setting(args, "custom_generate_function_path")

    async def attempt(current: Sample) -> Any:
        if path is None:
            result: Any = await generate(args, current, dict(sampling_params))
        else:
            function = load_function(path, "generate")
            result = await call_generate(function, args, current, dict(sampling_params), evaluation)
            complete(result, current, lambda: state.tokenizer)
        is_end = state.aborted or (state.requeues_aborted and not evaluation)
        if not is_end and any(s.status is Sample.Status.ABORTED for s in iter_samples(result)):
            raise RuntimeError("the engine aborted the request although the rollout goes on")
        return result

    what = "generate" if path is None else f"--custom-generate-function-path {path}"
    return await generate_with_retries(attempt, sample, retries=setting(args, "max_sample_retries"), what=what)


async def _score(args: Namespace, result: Any) -> None:
    """Fill in missing rewards, of one sample or of the samples of one execution."""
    samples = list(iter_samples(result))
    if any(sample.status is Sample.Status.ABORTED for sample in samples):
        return
    missing = [sample for sample in samples if sample.reward is None]
    if not missing:
        return
    if isinstance(result, list):
        rewards = await batched_async_rm(args, missing)
    else:
        rewards = [await async_rm(args, result)]
    for sample, reward in zip(missing, rewards, strict=True):
        sample.reward = reward


async def generate_and_rm_group(
    args: Namespace, group: list[Any], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate and score the samples of one prompt; an entry becomes a list where its execution made several."""
    state = GenerateState(args)
    if state.aborted:
        return group
    for sample in iter_samples(group):
        sample.session_id = sample.session_id or str(uuid4())
    path = next(iter_samples(group)).generate_function_path or setting(args, "custom_generate_function_path")
    function = None if path is None else load_function(path, "generate")
    if function is not None and takes_group(function):
        result = await _generate_whole_group(args, state, function, group, sampling_params, evaluation)
    else:
        tasks = [
            asyncio.create_task(
                generate_and_rm(args, sample, _seeded(state, sampling_params, i), evaluation=evaluation)
            )
            for i, sample in enumerate(group)
        ]
        result = await _gather(tasks)
    if setting(args, "group_rm") and not state.aborted:
        samples = list(iter_samples(result))
        for sample, reward in zip(samples, await batched_async_rm(args, samples), strict=True):
            sample.reward = reward
    return result


async def _generate_whole_group(
    args: Namespace,
    state: GenerateState,
    function: Callable[..., Any],
    group: list[Any],
    sampling_params: dict[str, Any],
    evaluation: bool,
) -> list[Any]:
    async with state.places_of_a_group(len(group)):
        if state.aborted:
            return group
        result = await call_group_generate(function, args, group, dict(sampling_params), evaluation)
    for entry, source in zip(result, group, strict=True):
        complete(entry, source, lambda: state.tokenizer)
    result = await apply_rollout_sample_hooks(args, result, evaluation=evaluation)
    if not setting(args, "group_rm"):
        await asyncio.gather(*(_score(args, entry) for entry in result))
    return list(result)


def _seeded(state: GenerateState, sampling_params: dict[str, Any], position: int) -> dict[str, Any]:
    params = dict(sampling_params)
    if state.group_sampling_seeds:
        params["sampling_seed"] = state.args.rollout_seed + position
    return params


async def _gather(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Results in order; the first failure cancels the others."""
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


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
    groups = await end_tasks(state.pendings, get_model_url(args, "default", "/workers"), patience_s)
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
            dynamic_filter=None if filter_path is None else load_function(filter_path, "filter"),
            label=f"rollout {rollout_id}",
            keeps_responses=setting(args, "partial_rollout"),
        )
        note_start(collected.left_over, rollout_id)
        metrics = dict(collected.metrics)
        failed = sum(sample.metadata.get("failed_attempts", 0) for sample in iter_samples(collected.groups))
        if failed:
            metrics["rollout/failed_generations"] = failed
    finally:
        state.reset()
    log_sample(next(iter_samples(collected.groups)), f"rollout {rollout_id}, first sample")
    if (path := setting(args, "rollout_sample_filter_path")) is not None:
        load_function(path, "filter")(args, collected.groups)
    if (path := setting(args, "rollout_all_samples_process_path")) is not None:
        owner = getattr(data_source_get_samples, "__self__", data_source_get_samples)
        load_function(path)(args, collected.all_groups, owner)
    return RolloutFnTrainOutput(samples=collected.groups, metrics=metrics), collected.left_over


async def eval_rollout(args: Namespace, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[SampleGroup]]:
    """Evaluate on every set of ``args.eval_datasets``. The second result is always empty."""
    state = GenerateState(args)
    sets = []
    for config in args.eval_datasets or []:
        key = (config.cache_key, bool(config.apply_chat_template), str(config.apply_chat_template_kwargs))
        if key not in state.eval_datasets:
            state.eval_datasets[key] = load_eval_dataset(args, config, state.tokenizer)
        sets.append((config, state.eval_datasets[key]))
    try:
        return RolloutFnEvalOutput(data=await evaluate(args, sets, generate_and_rm_group)), []
    finally:
        state.reset()


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
