"""Evaluation: every set, every prompt, n samples each, scored; nothing is filtered and nothing trained."""

from __future__ import annotations

import asyncio
import copy
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from tqdm import tqdm

from slime.data.prompts import Dataset
from slime.data.sample import Sample, iter_samples
from slime.rollout.eval_config import EvalDatasetConfig
from slime.rollout.sampling import eval_sampling_params
from slime.rollout.settings import setting
from slime.utils.errors import DataError

__all__ = ["evaluate", "load_eval_dataset"]

_BAR_DELAY_S = 2.0

GenerateGroup = Callable[..., Awaitable[list[Any]]]


def load_eval_dataset(args: Namespace, config: EvalDatasetConfig, tokenizer: Any) -> Dataset:
    """Read and render one set."""
    return Dataset(
        config.path,
        tokenizer,
        None,
        setting(args, "eval_max_prompt_len"),
        prompt_key=config.input_key or setting(args, "input_key"),
        label_key=config.label_key,
        tool_key=config.tool_key,
        metadata_key=config.metadata_key or setting(args, "metadata_key"),
        apply_chat_template=bool(config.apply_chat_template),
        apply_chat_template_kwargs=config.apply_chat_template_kwargs,
    )


async def evaluate(
    args: Namespace, sets: Iterable[tuple[EvalDatasetConfig, Dataset]], generate_group: GenerateGroup
) -> dict[str, dict[str, Any]]:
    """``{set: {"rewards", "truncated", "samples"}}``, all sets at the same time.

    Args:
        generate_group: ``await f(args, group, sampling_params, evaluation=True)`` gives the scored group.

    Raises:
        Whatever the first failing group raised; the others are cancelled.
    """
    args = _with_eval_limits(args)
    names: list[str] = []
    tasks: list[asyncio.Task[list[Any]]] = []
    for config, dataset in sets:
        params = eval_sampling_params(config)
        for group in _groups(config, dataset):
            names.append(config.name)
            tasks.append(asyncio.create_task(_one(generate_group, args, group, dict(params))))
    await _all(tasks)
    results: dict[str, list[Sample]] = {name: [] for name in dict.fromkeys(names)}
    for name, task in zip(names, tasks, strict=True):
        results[name] += iter_samples(task.result())
    key = setting(args, "eval_reward_key") or setting(args, "reward_key")
    return {name: _summary(name, samples, key) for name, samples in results.items()}


async def _one(generate_group: GenerateGroup, args: Namespace, group: list[Any], params: dict[str, Any]) -> list[Any]:
    return await generate_group(args, group, params, evaluation=True)


async def _all(tasks: list[asyncio.Task[list[Any]]]) -> None:
    bar = tqdm(total=len(tasks), desc="evaluation", unit="prompt", delay=_BAR_DELAY_S, mininterval=1.0, leave=False)
    try:
        for finished in asyncio.as_completed(tasks):
            await finished
            bar.update()
    finally:
        bar.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _groups(config: EvalDatasetConfig, dataset: Dataset) -> Iterable[list[Sample]]:
    index = 0
    for number, prompt in enumerate(dataset.origin_samples):
        group = []
        for _ in range(config.n_samples_per_eval_prompt or 1):
            sample = copy.deepcopy(prompt)
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


def _with_eval_limits(args: Namespace) -> Namespace:
    """The namespace that generation sees: evaluation's context length in the place of training's."""
    limit = setting(args, "eval_max_context_len")
    if limit is None or limit == setting(args, "rollout_max_context_len"):
        return args
    twin = copy.copy(args)
    twin.rollout_max_context_len = limit
    return twin
