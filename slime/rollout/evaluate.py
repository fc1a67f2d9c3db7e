"""Evaluation: generates and scores n samples for every prompt of every set, without filters and training."""

from __future__ import annotations

import asyncio
import functools
import logging
from argparse import Namespace
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime.config.groups import from_args, with_values
from slime.data.prompts import Dataset
from slime.data.sample import Sample, iter_samples
from slime.rollout.arguments import RewardModelArgs
from slime.rollout.base_types import Count
from slime.rollout.collect import gather
from slime.rollout.custom_generate import on_begin
from slime.rollout.engine_request import eval_sampling_params, train_sampling_params
from slime.rollout.eval_config import EvalDatasetConfig
from slime.rollout.failures import FailureBudget, failed_reward, fresh_copy, give_up
from slime.rollout.source_state import PromptData
from slime.utils.async_utils import call_in_thread
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

GenerateGroup = Callable[..., Awaitable[list[Any]]]

EVAL_PROMPT_DATASET: dict[Any, Dataset] = {}
"""Prompts of the evaluation sets that were read. Evaluation functions of plugins use it too."""


def eval_prompts(prompts: PromptData, config: EvalDatasetConfig, known: dict[Any, Dataset]) -> Dataset:
    """The prompts of a set, read once per process and way of reading. Slow the first time: call it in a thread.

    Args:
        prompts: the flags. The set's own values replace them.
        known: the sets that were read; receives this one.
    """
    # Part of the key: two sets may read the same file with different templates.
    how = (bool(config.apply_chat_template), config.apply_chat_template_kwargs, config.multimodal_keys)
    key = (config.cache_key, prompts.hf_checkpoint, str(how))
    if key not in known:
        known[key] = replace(
            prompts,
            input_key=config.input_key or prompts.input_key,
            label_key=config.label_key,
            tool_key=config.tool_key,
            metadata_key=config.metadata_key or prompts.metadata_key,
            apply_chat_template=bool(config.apply_chat_template),
            apply_chat_template_kwargs=config.apply_chat_template_kwargs or {},
            multimodal_keys=config.multimodal_keys,
            num_data_workers=0,
        ).dataset(config.path)
    return known[key]


async def evaluate(
    args: Namespace, configs: Sequence[EvalDatasetConfig], generate_group: GenerateGroup
) -> dict[str, dict[str, Any]]:
    """``{set: {"rewards", "truncated", "samples"}}``, all sets at the same time.

    Args:
        generate_group: ``await f(args, group, sampling_params, evaluation=True)`` gives the scored group.

    Raises:
        DataError: too many failed samples, or too few finished ones. Also the error of the first failing group, which
            cancels the others.
    """
    prompts = replace(from_args(PromptData, args), rollout_max_prompt_len=args.eval_max_prompt_len)
    sets = [(config, await call_in_thread(eval_prompts, prompts, config, EVAL_PROMPT_DATASET)) for config in configs]
    if (limit := args.eval_max_context_len) not in (None, args.rollout_max_context_len):
        # A copy: a rollout with the original may be running at the same time.
        args = with_values(args, rollout_max_context_len=limit)
    keys, of_training = from_args(RewardModelArgs, args).keys, train_sampling_params(args)
    key = args.eval_reward_key or args.reward_key
    wanted = sum(len(dataset) * (config.n_samples_per_eval_prompt or 1) for config, dataset in sets)
    failures = FailureBudget(args.max_failed_share, wanted)
    count = Count(wanted, "samples")

    def on_finished(group: list[Any]) -> None:
        failures.check(group)
        count.add(len(group))

    def generate(config: EvalDatasetConfig) -> GenerateGroup:
        # the set's reward, also if it is none: that of training must not take its place
        own = {"custom_rm_path": config.custom_rm_path}
        return functools.partial(
            generate_group, args if own.items() <= vars(args).items() else with_values(args, **own)
        )

    tasks = [
        asyncio.create_task(_evaluate_set(config, dataset, of_training, generate(config), keys, on_finished))
        for config, dataset in sets
    ]
    try:
        samples = await gather(tasks)  # after an error of one set the others must not keep the engines busy
    finally:
        count.close()
    return {config.name: _summary(config.name, found, key) for (config, _), found in zip(sets, samples, strict=True)}


async def _evaluate_set(
    config: EvalDatasetConfig,
    dataset: Dataset,
    of_training: Mapping[str, Any],
    generate: GenerateGroup,
    keys: Sequence[str],
    on_finished: Callable[[list[Any]], None],
) -> list[Sample]:
    """The finished samples of a set, which are all samples unless the set ends early."""
    params = eval_sampling_params(config, of_training)
    finished: asyncio.Queue[asyncio.Task[list[Any]]] = asyncio.Queue()
    tasks: dict[asyncio.Task[list[Any]], int] = {}
    # All groups start at once. The slots of the generation limit the running samples.
    for group in _groups(config, dataset):
        task = asyncio.create_task(_generate(config, group, dict(params), generate, keys))
        task.add_done_callback(finished.put_nowait)
        tasks[task] = len(group)
    samples: list[Sample] = []
    try:
        while tasks:
            patience_s = _patience_s(config, sum(tasks.values()))
            try:
                task = await asyncio.wait_for(finished.get(), patience_s)
            except TimeoutError:
                logger.warning(
                    "evaluation set %s ends without its last %d samples: none finished for %g s "
                    "(eval_early_stop_idle_timeout)",
                    config.name,
                    sum(tasks.values()),
                    patience_s,
                )
                break
            on_finished(task.result())
            samples += iter_samples(task.result())
            del tasks[task]
    finally:
        await _cancel(tasks)
    if len(samples) < (config.min_eval_samples or 0):
        raise DataError(
            f"evaluation set {config.name} has {len(samples)} finished samples, fewer than min_eval_samples "
            f"{config.min_eval_samples}"
        )
    return samples


def _patience_s(config: EvalDatasetConfig, num_remaining: int) -> float | None:
    """Seconds to wait for the next sample; None while many are missing."""
    if config.eval_early_stop_remaining is None or num_remaining > config.eval_early_stop_remaining:
        return None
    return config.eval_early_stop_idle_timeout


async def _generate(
    config: EvalDatasetConfig, group: list[Any], params: dict[str, Any], generate: GenerateGroup, keys: Sequence[str]
) -> list[Any]:
    """The scored group. ``eval_task_timeout`` seconds after it got a slot its samples count as failed."""
    limit, seconds = asyncio.timeout(None), config.eval_task_timeout

    def begin() -> None:
        if seconds is not None and limit.when() is None:
            limit.reschedule(asyncio.get_running_loop().time() + seconds)

    on_begin.set(begin)  # of this task, and of those that it starts
    try:
        async with limit:
            return await generate(group, params, evaluation=True)
    except TimeoutError as error:
        # The generate function raised it, and this limit has not expired.
        if not limit.expired():
            raise
        for sample in group:
            message = f"sample {sample.index} of evaluation set {config.name} took longer than eval_task_timeout"
            give_up(sample, "deadline", error, f"{message} {config.eval_task_timeout} s")
            sample.reward = failed_reward(keys)
        return group


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _groups(config: EvalDatasetConfig, dataset: Dataset) -> Iterable[list[Sample]]:
    index = 0
    for number, prompt in enumerate(dataset.origin_samples):
        group = []
        for _ in range(config.n_samples_per_eval_prompt or 1):
            sample = fresh_copy(prompt)
            sample.index, sample.group_index = index, number
            sample.metadata = config.inject_metadata(sample.metadata)
            sample.custom_rm_path = config.custom_rm_path
            sample.generate_function_path = config.custom_generate_function_path
            group.append(sample)
            index += 1
        yield group


def _summary(name: str, samples: list[Sample], key: str | None) -> dict[str, Any]:
    samples.sort(key=lambda sample: sample.index if isinstance(sample.index, int) else 0)
    rewards = []
    for sample in samples:
        if key and not (isinstance(sample.reward, dict) and key in sample.reward):
            raise DataError(
                f"evaluation set {name}: the reward of sample {sample.index} is {sample.reward!r}, which has no "
                f"{key!r} (--eval-reward-key, --reward-key)"
            )
        rewards.append(sample.reward[key] if key else sample.reward)
    return {"rewards": rewards, "truncated": [sample.truncated for sample in samples], "samples": samples}
