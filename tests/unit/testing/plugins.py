"""Plugins of every kind: good ones, and ones with the mistakes that people make."""

from __future__ import annotations

import asyncio
import json
import threading

import torch

from slime.data.sample import Sample
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.http_utils import post


async def post_yourself(args, sample, sampling_params):
    """The seed's style: a separate request."""
    state = GenerateState(args)
    ids = state.tokenizer.encode("2+2=", add_special_tokens=False)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    reply = await post(url, {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True})
    pairs = reply["meta_info"]["output_token_logprobs"]
    sample.tokens = ids
    sample.append_response_tokens(
        args,
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=reply["meta_info"],
        text=reply["text"],
    )
    return sample


async def fan_out(args, sample, sampling_params):
    other = Sample(prompt=sample.prompt, label=sample.label)
    return [await generate(args, one, dict(sampling_params)) for one in (sample, other)]


async def whole_group(args, samples):
    params = GenerateState(args).sampling_params
    return list(await asyncio.gather(*(generate(args, sample, dict(params)) for sample in samples)))


async def text_only(args, sample, sampling_params):
    sample.response = "4"
    return sample


async def short_mask(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.loss_mask = [1]
    return sample


async def nothing(args, sample, sampling_params):
    return None


async def group_loses_one(args, samples):
    return samples[:1]


def rollout(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2], 1, [-0.1]
            sample.reward, sample.status = 1.0, Sample.Status.COMPLETED
    return RolloutFnTrainOutput(samples=groups)


def rollout_without_rewards(args, rollout_id, data_source, evaluation=False):
    groups = rollout(args, rollout_id, data_source).samples
    groups[0][0].reward = None
    return groups[:1]


def rollout_with_other_names(a, b, c, evaluation=False):
    return rollout(a, b, c)


async def reward_nan(args, sample, **kwargs):
    return float("nan")


async def reward_dict(args, sample, **kwargs):
    return {"score": 1.0}


async def rewards_too_few(args, samples, **kwargs):
    return [1.0]


def reward_raises(args, sample, **kwargs):
    raise KeyError("ground_truth")


def reward_signature(sample):
    return 1.0


def filter_none(args, samples, **kwargs):
    print(len(samples))


def buffer_keeps(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]


def best_samples(args, buffer, n):
    return sorted(buffer, key=lambda s: s.reward, reverse=True)[:n]


def best_groups(args, buffer, n):
    return sorted(buffer, key=lambda group: group[0].reward, reverse=True)[:n]


def too_many_samples(args, buffer, n):
    return sorted(buffer, key=lambda s: s.reward)


class Source:
    def __init__(self, args):
        self.args = args

    def get_samples(self, num_samples):
        number = self.args.n_samples_per_prompt
        return [[Sample(index=g * number + i) for i in range(number)] for g in range(num_samples)]

    def add_samples(self, samples):
        pass

    def save(self, rollout_id):
        pass

    def load(self, rollout_id=None):
        pass

    def __len__(self):
        return 10


class SourceWithEqualIndices(Source):
    def get_samples(self, num_samples):
        return [[Sample(index=0) for _ in range(self.args.n_samples_per_prompt)] for _ in range(num_samples)]


class SourceWithoutNumbers:
    """Gives single samples, and has no other method."""

    def get_samples(self, num_samples):
        return [Sample(prompt="1+1=", label="2") for _ in range(num_samples)]


class NoSource:
    pass


def hook_that_marks(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["seen"] = rollout_id


def hook_of_text(args, sample):
    return sample.response


def filter_removes(args, groups):
    groups[0][0].remove_sample = True


def filter_deletes(args, groups):
    groups.pop()


def see_all(args, all_groups, data_source):
    data_source.add_samples([])


def post_process(args, samples):
    return [sample.reward for sample in samples], [0.0] * len(samples)


def post_process_flat(args, samples):
    return [0.0] * len(samples)


def convert(args, samples):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [0.0] * len(samples),
        "raw_reward": [0.0] * len(samples),
        "truncated": [0] * len(samples),
        "loss_masks": [s.loss_mask for s in samples],
        "sample_indices": [s.index for s in samples],
    }


def convert_ragged(args, samples):
    return convert(args, samples) | {"rewards": [0.0]}


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    return False


def log_eval_text(rollout_id, args, data, extra_metrics):
    return "logged"


def advantage(args, rollout_data):
    rollout_data["advantages"] = rollout_data["returns"] = [torch.ones_like(row) for row in rollout_data["log_probs"]]


def advantage_scalar(args, rollout_data):
    rollout_data["advantages"] = [torch.ones(1) for _ in rollout_data["log_probs"]]


def tis_detached(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss.detach(), loss_masks, {"m": torch.ones(1)}


def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return torch.sum


def reducer_of_nothing(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values


def postprocess_drops(args, rollout_id, rollout_data):
    rollout_data["tokens"].pop()


def megatron_init(args):
    raise AssertionError("not called without a trainer")


def waits_for_ever(args, all_samples, data_source):
    threading.Event().wait()


def filter_parses(args, groups):
    json.loads(groups[0][0].response + "{")
