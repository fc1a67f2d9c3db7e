"""One check per hook: calls the user's function as a run does, and yields a sentence per problem.

The caller reports errors of the function with their traceback.
"""

from __future__ import annotations

import asyncio
import math
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.data.sample import Sample, as_groups, iter_samples
from slime.hooks import accepts, can_be_called, parameter_names, takes_group
from slime.rollout.base_types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.custom_generate import GenerateFunction, apply_rollout_sample_hooks, complete
from slime.rollout.data_source import BufferFilter, make_data_source
from slime.rollout.failures import fresh_copy
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sglang_rollout import GenerateState
from slime.testing.fakes import NUM_GROUPS, PromptList, finished_groups, fresh_groups
from slime.utils.http_utils import close_http_client


@dataclass(frozen=True)
class Call:
    """One function to be checked.

    Attributes:
        function: the user's, loaded.
        args: the arguments of the run. If the check needs an engine, the router's address leads to a pretended one.
        row: a sample of the run's data source.
    """

    function: Callable[..., Any]
    args: Namespace
    row: Sample


Check: TypeAlias = Callable[[Call], Iterator[str]]


def custom_generate(call: Call) -> Iterator[str]:
    (group, *_) = fresh_groups(call.row)
    state = GenerateState(call.args)
    params = dict(state.sampling_params)
    function = GenerateFunction(call.args, call.function)

    async def generate() -> list[Any]:
        if takes_group(call.function):
            return await function.of_group(group, params, evaluation=False)
        # dict(): a function may change the sampling parameters
        return [await function.of_one(sample, dict(params), evaluation=False) for sample in iter_samples(group)]

    results = _run(generate())
    for source, result in zip(iter_samples(group), results, strict=True):
        complete(result, source, state.tokenizer)
        # one execution may return several samples: they must weigh as one rollout in the loss
        siblings = list(iter_samples(result))
        for sample in siblings:
            yield from generated_sample(sample)
        if len(siblings) > 1 and len({sample.rollout_id for sample in siblings}) > 1:
            yield "the samples of one execution have different rollout_id: leave it at None, or give them the same"


def _run(work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    async def closing() -> list[Any]:
        try:
            return await work
        finally:
            await close_http_client()  # the client belongs to the event loop, which ends here

    return asyncio.run(closing())


def generated_sample(sample: Sample) -> Iterator[str]:
    """Problems of a sample that prevent training on it."""
    if sample.status in (Sample.Status.ABORTED, Sample.Status.FAILED):
        yield f"a sample has the status {sample.status.value} although the engine answered"
        return
    if not sample.tokens or sample.response_length <= 0:
        yield f"a sample has {len(sample.tokens)} tokens and response_length {sample.response_length}"
    elif sample.response_length >= len(sample.tokens):
        yield f"response_length {sample.response_length} leaves no prompt in {len(sample.tokens)} tokens"
    for name, values in (("loss_mask", sample.loss_mask), ("rollout_log_probs", sample.rollout_log_probs)):
        if values is not None and len(values) != sample.response_length:
            yield f"{name} has {len(values)} entries for response_length {sample.response_length}"
    if sample.rollout_log_probs is None:
        yield "rollout_log_probs are missing: append what the engine sampled by Sample.append_response_tokens"
    if sample.loss_mask is not None and not any(sample.loss_mask):
        yield "the loss mask is 0 everywhere: nothing would be trained"


def rollout_function(call: Call) -> Iterator[str]:
    names = parameter_names(call.function)[:3]
    wanted = ["args", "rollout_id"]
    if names[:2] != wanted:
        yield f"its first parameters are {', '.join(names)}; callers may pass args and rollout_id by name"
    source = PromptList(call.row)
    output = call_rollout_fn(call.function, call.args, 0, source, evaluation=False)
    if not isinstance(output, RolloutFnTrainOutput):
        yield f"it returned {type(output).__name__} for training"
        return
    if len(output.samples) != call.args.rollout_batch_size:
        yield f"it returned {len(output.samples)} groups; --rollout-batch-size is {call.args.rollout_batch_size}"
    for sample in iter_samples(output.samples):
        if sample.reward is None:
            yield f"sample {sample.index} has no reward"
        yield from generated_sample(sample)


def eval_function(call: Call) -> Iterator[str]:
    output = call_rollout_fn(call.function, call.args, 0, PromptList(call.row), evaluation=True)
    if not isinstance(output, RolloutFnEvalOutput):
        yield f"it returned {type(output).__name__} for evaluation"
        return
    for name, found in output.data.items():
        if "rewards" not in found:
            yield f"the results of {name} have no 'rewards'"
        lengths = {key: len(values) for key, values in found.items() if isinstance(values, list)}
        if len(set(lengths.values())) > 1:
            yield f"the lists of {name} are not equally long: {lengths}"


def custom_reward(call: Call) -> Iterator[str]:
    key = call.args.reward_key
    (group, *_) = finished_groups(key, with_reward=False)
    samples = list(iter_samples(group))
    is_batched = call.args.group_rm or accepts(call.function, "samples")

    async def score() -> list[Any]:
        if is_batched:
            return await batched_async_rm(call.args, samples)
        return [await async_rm(call.args, sample) for sample in samples]

    rewards = _run(score())
    if len(rewards) != len(samples):
        yield f"it returned {len(rewards)} rewards for {len(samples)} samples"
    for reward in rewards:
        if isinstance(reward, dict) and key is None:
            yield "it returned a dict, and --reward-key does not say which entry is the reward"
            return
        if isinstance(reward, dict) and key not in reward:
            yield f"it returned a dict without {key!r}, which --reward-key names: {', '.join(map(str, reward))}"
            return
        value = reward[key] if isinstance(reward, dict) else reward
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            yield f"the reward is {value!r}; it must be a finite number"
            return


def dynamic_filter(call: Call) -> Iterator[str]:
    for group in finished_groups(call.args.reward_key):
        output = call.function(call.args, group)
        if isinstance(output, DynamicFilterOutput):
            output = output.keep
        # comparisons in numpy and torch give bool_, bool and Tensor
        if not isinstance(output, bool) and type(output).__name__ not in ("bool_", "bool", "Tensor"):
            yield f"it returned {type(output).__name__}; it must return a bool or a DynamicFilterOutput"
            return


def buffer_filter(call: Call) -> Iterator[str]:
    groups: list[Any] = finished_groups(call.args.reward_key)
    chooses = BufferFilter(call.function, call.args)
    has_samples = chooses.takes_samples()
    buffer, kind = (list(iter_samples(groups)), "samples") if has_samples else (groups, "groups")
    # the function may change the buffer in place
    before = list(buffer)
    chosen = chooses(buffer, 1)
    if not isinstance(chosen, list):
        yield f"it returned {type(chosen).__name__}; it must return a list of {kind}"
        return
    if len(chosen) > 1:
        yield f"it returned {len(chosen)} {kind} where 1 was asked for"
    # by identity: samples of a buffer may be equal
    known = [id(item) for item in before]
    if any(id(item) not in known for item in chosen):
        yield f"it returned {kind} that are not of the buffer"
    # with fewer parameters, the data source removes the chosen samples itself
    removes = len(parameter_names(call.function)) >= 4
    if removes and any(item is kept for item in chosen for kept in buffer):
        yield f"{kind} that it returned are still in the buffer: they would be drawn again"


def data_source(call: Call) -> Iterator[str]:
    source = make_data_source(call.function, call.args)
    if not hasattr(source, "get_samples"):
        yield "it has no get_samples"
        return
    size = call.args.n_samples_per_prompt
    groups = as_groups(source.get_samples(NUM_GROUPS), lambda prompt: [fresh_copy(prompt) for _ in range(size)])
    if len(groups) != NUM_GROUPS:
        yield f"get_samples({NUM_GROUPS}) gave {len(groups)} groups"
    sizes = {len(group) for group in groups}
    if sizes != {size}:
        yield f"groups have {sorted(sizes)} samples; --n-samples-per-prompt is {size}"
    indices = [sample.index for sample in iter_samples(groups) if sample.index is not None]
    if len(set(indices)) != len(indices):
        yield f"samples need different indices, or None to be numbered; they have {indices}"
    if hasattr(source, "add_samples"):
        source.add_samples([])


def sample_hook(call: Call) -> Iterator[str]:
    (group, *_) = finished_groups(call.args.reward_key, with_reward=False)
    for sample in iter_samples(group):
        result = asyncio.run(apply_rollout_sample_hooks(call.args, sample, rollout_id=0, evaluation=False))
        yield from generated_sample(result)


def sample_filter(call: Call) -> Iterator[str]:
    groups = finished_groups(call.args.reward_key)
    # by identity and order: a copy of a sample would lose its place in the batch
    before = [id(sample) for sample in iter_samples(groups)]
    call.function(call.args, groups)
    if [id(sample) for sample in iter_samples(groups)] != before:
        yield "it changed which samples there are; it must only set remove_sample"
    marks = {type(sample.remove_sample) for sample in iter_samples(groups)}
    if marks != {bool}:
        yield f"remove_sample must be True or False, found {', '.join(sorted(kind.__name__ for kind in marks))}"


def all_samples(call: Call) -> Iterator[str]:
    call.function(call.args, finished_groups(call.args.reward_key), PromptList(call.row))
    # the function may return anything: only an error is a problem
    yield from ()


def reward_post_process(call: Call) -> Iterator[str]:
    samples = list(iter_samples(finished_groups(call.args.reward_key)))
    result = call.function(call.args, samples)
    if not isinstance(result, tuple) or len(result) != 2:
        yield f"it returned {type(result).__name__}; it must return (raw rewards, rewards)"
        return
    for name, values in zip(("raw", "processed"), result, strict=True):
        if len(values) != len(samples):
            yield f"it returned {len(values)} {name} rewards for {len(samples)} samples"
        elif not all(math.isfinite(float(value)) for value in values):
            yield f"{name} rewards are not all finite: {list(values)}"


def convert_samples(call: Call) -> Iterator[str]:
    samples = list(iter_samples(finished_groups(call.args.reward_key)))
    data = compile_train_data(samples, rewards=RewardArgs(), convert=call.function, args=call.args)
    lengths = {name: len(values) for name, values in data.items() if isinstance(values, Sequence)}
    if len(set(lengths.values())) > 1:
        yield f"its columns are not equally long: {lengths}"


def rollout_log(call: Call) -> Iterator[str]:
    samples = list(iter_samples(finished_groups(call.args.reward_key)))
    yield from _is_flag(call.function(0, call.args, samples, {}, 1.0))


def eval_log(call: Call) -> Iterator[str]:
    samples = list(iter_samples(finished_groups(call.args.reward_key)))
    data = {"set": {"rewards": [0.0] * len(samples), "truncated": [False] * len(samples), "samples": samples}}
    yield from _is_flag(call.function(0, call.args, data, {}))


def _is_flag(result: Any) -> Iterator[str]:
    if result is not None and not isinstance(result, bool):
        yield f"it returned {type(result).__name__}; true means that nothing else is logged, so return a bool or None"


CHECKS: dict[str, Check] = {
    "rollout_function_path": rollout_function,
    "eval_function_path": eval_function,
    "custom_generate_function_path": custom_generate,
    "custom_rm_path": custom_reward,
    "dynamic_sampling_filter_path": dynamic_filter,
    "buffer_filter_path": buffer_filter,
    "data_source_path": data_source,
    "rollout_sample_hook_path": sample_hook,
    "rollout_sample_filter_path": sample_filter,
    "rollout_all_samples_process_path": all_samples,
    "custom_reward_post_process_path": reward_post_process,
    "custom_convert_samples_to_train_data_path": convert_samples,
    "custom_rollout_log_function_path": rollout_log,
    "custom_eval_rollout_log_function_path": eval_log,
}
"""Argument of the hook -> its check. Hooks of the trainer are in :data:`TRAINER_CHECKS`."""

# Checks of the trainer hooks that need no trainer: they get tensors of two samples, on the CPU.

_PROMPT_LENGTH = 3
_RESPONSE_LENGTHS = [2, 4]
_TOTAL_LENGTHS = [_PROMPT_LENGTH + length for length in _RESPONSE_LENGTHS]
SIGNATURE_ONLY = "its signature fits; it runs with the trainer's model only"


def _rows(value: float) -> list[torch.Tensor]:
    """One tensor ``[R_i]`` per sample."""
    return [value - 0.1 * torch.arange(length, dtype=torch.float32) for length in _RESPONSE_LENGTHS]


def _rollout_data() -> dict[str, Any]:
    """A rank's batch once its log-probs are known."""
    return {
        "tokens": [torch.arange(length) for length in _TOTAL_LENGTHS],
        "response_lengths": list(_RESPONSE_LENGTHS),
        "total_lengths": list(_TOTAL_LENGTHS),
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in _RESPONSE_LENGTHS],
        "rewards": [1.0, -1.0],
        "raw_reward": [1.0, 0.0],
        "rollout_ids": [0, 1],
        "rollout_mask_sums": list(_RESPONSE_LENGTHS),
        "truncated": [0, 0],
        "sample_indices": [0, 1],
        "log_probs": _rows(-0.5),
        "rollout_log_probs": _rows(-0.6),
        "ref_log_probs": _rows(-0.7),
        "values": _rows(0.2),
        "advantages": _rows(0.3),
        "returns": _rows(0.4),
    }


def custom_advantage(call: Call) -> Iterator[str]:
    data = _rollout_data()
    del data["advantages"], data["returns"]
    call.function(call.args, data)
    for name in ("advantages", "returns"):
        lengths = [len(row) for row in data.get(name, ())]
        if lengths != _RESPONSE_LENGTHS:
            yield f"rollout_data[{name!r}] has rows of {lengths or 'nothing'}; the responses have {_RESPONSE_LENGTHS}"


def custom_tis(call: Call) -> Iterator[str]:
    # with a graph, so that a detached result is found
    pg_loss = torch.cat(_rows(0.3)).requires_grad_()
    result = call.function(
        call.args,
        pg_loss=pg_loss,
        train_log_probs=_rows(-0.5),
        rollout_log_probs=_rows(-0.6),
        loss_masks=[torch.ones(length) for length in _RESPONSE_LENGTHS],
        total_lengths=list(_TOTAL_LENGTHS),
        response_lengths=list(_RESPONSE_LENGTHS),
    )
    if not isinstance(result, tuple) or len(result) != 3:
        yield f"it returned {type(result).__name__}; it must return (pg_loss, masks, metrics)"
        return
    corrected, masks, metrics = result
    if corrected.shape != pg_loss.shape:
        yield f"pg_loss must keep its shape {tuple(pg_loss.shape)}, it is {tuple(corrected.shape)}"
    elif not corrected.requires_grad:
        yield "pg_loss has lost its gradient"
    if [len(mask) for mask in masks] != _RESPONSE_LENGTHS:
        yield f"masks have {[len(mask) for mask in masks]} entries; the responses have {_RESPONSE_LENGTHS}"
    for name, values in metrics.items():
        if values.shape != pg_loss.shape:
            yield f"metric {name!r} must have one value per token, its shape is {tuple(values.shape)}"


def pg_loss_reducer(call: Call) -> Iterator[str]:
    masks = [torch.ones(length) for length in _RESPONSE_LENGTHS]
    # the function gets the mode as an argument and must support both
    for per_token in (False, True):
        reduce = call.function(list(_TOTAL_LENGTHS), list(_RESPONSE_LENGTHS), masks, per_token)
        if not callable(reduce):
            yield f"it returned {type(reduce).__name__}; it must return a function from one value per token to a scalar"
            return
        total = reduce(torch.cat(_rows(0.3)))
        if total.numel() != 1:
            yield f"its function returned shape {tuple(total.shape)}; it must return a scalar"
            return


def data_postprocess(call: Call) -> Iterator[str]:
    data = _rollout_data()
    # both signatures are supported, as in a run
    if can_be_called(call.function, ("args", "rollout_id", "rollout_data")):
        call.function(call.args, 0, data)
    else:
        call.function(call.args, data)
    lengths = {name: len(values) for name, values in data.items() if isinstance(values, list)}
    if len(set(lengths.values())) > 1:
        yield f"the columns are not equally long afterwards: {lengths}"


TRAINER_CHECKS: dict[str, Check] = {
    "custom_advantage_function_path": custom_advantage,
    "custom_tis_function_path": custom_tis,
    "custom_pg_loss_reducer_function_path": pg_loss_reducer,
    "rollout_data_postprocess_path": data_postprocess,
}
