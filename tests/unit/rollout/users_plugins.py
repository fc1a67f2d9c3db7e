"""Plugins as their authors wrote them for slime: kept in their style, because they must work without a change."""

import copy
import random

import slime.rollout.sglang_rollout as rollout
from slime.rollout.base_types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import DataSource, RolloutDataSourceWithBuffer
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.types import Sample

# --- several turns with a tool: --custom-generate-function-path

MAX_TURNS = 3


async def search_tool(query):
    return f"<information>{query}</information>"


async def generate_with_tool(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported for this function at the moment."
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    sample.tokens = list(prompt_ids)
    sample.tool_call_count = 0
    for turn in range(MAX_TURNS):
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        items = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[item[1] for item in items],
            log_probs=[item[0] for item in items],
            trainable=True,
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if output["meta_info"]["finish_reason"]["type"] == "length" or turn == MAX_TURNS - 1:
            break
        observation = await search_tool(output["text"])
        observation_ids = state.tokenizer.encode(observation, add_special_tokens=False)
        sample.append_response_tokens(args, tokens=observation_ids, trainable=False, text=observation)
        sample.tool_call_count += 1
    sample.payload_text = sample.prompt + sample.response
    sample.metadata["round_number"] = turn + 1
    return sample


# --- the older style: lists filled by hand, an alias of the mask


async def generate_by_hand(args, sample, sampling_params):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_tokens_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_token_ids, loss_masks = "", [], []
    for _ in range(2):
        payload = {"text": sample.prompt + response, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        cur_response_token_ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        cur_log_probs = [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        response += output["text"]
        response_token_ids += cur_response_token_ids
        loss_masks += [1] * len(cur_response_token_ids)
        if sample.rollout_log_probs is None:
            sample.rollout_log_probs = []
        sample.rollout_log_probs += cur_log_probs
    sample.tokens = prompt_tokens_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    sample.response = response
    sample.loss_mask = loss_masks
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


# --- a list of samples at once, which sets the reward too


async def custom_generate(args, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
    for sample in samples:
        sample.response = "The answer is 7"
        sample.reward = 1.0 if evaluation else random.random()
        sample.truncated = False
    return samples


async def custom_generate_batch(args, batch: list[Sample], evaluation: bool = False) -> list[Sample]:
    return await custom_generate(args, batch, evaluation)


# --- several rows of one execution


async def generate_rows(args, sample, sampling_params, evaluation=False):
    sample = await rollout.generate(args, sample, sampling_params)
    rows = [copy.deepcopy(sample) for _ in range(1 + sample.index % 2)]
    for row in rows:
        row.rollout_id = sample.index
    return rows


# --- rewards


class CustomRewardModel:
    made = 0

    def __init__(self, model_path):
        type(self).made += 1
        self.model_path = model_path

    def compute_reward(self, prompts, responses):
        return [len(response) / (1 + len(prompt)) for prompt, response in zip(prompts, responses)]  # noqa: B905


async def group_rm(args, samples, **kwargs):
    ranks = sorted(range(len(samples)), key=lambda i: len(samples[i].response))
    return [{"score": float(ranks.index(i)), "acc": i % 2, "comment": "relative"} for i in range(len(samples))]


async def rm_with_metadata(args, sample, **kwargs):
    expected = sample.metadata.get("answer", sample.label)
    return {"score": float(expected in sample.response), "category": "other"}


# --- data sources


class ListSource(DataSource):
    def __init__(self, args):
        self.args = args
        self.position = 0
        self.returned = []

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                sample = Sample(prompt=f"{self.position}+1=", label=str(self.position + 1), index=len(group))
                sample.group_index = self.position
                sample.index = self.position * self.args.n_samples_per_prompt + len(group)
                group.append(sample)
            self.position += 1
            groups.append(group)
        return groups

    def add_samples(self, samples):
        self.returned += samples

    def save(self, rollout_id):
        pass

    def load(self, rollout_id=None):
        pass

    def __len__(self):
        return 100


class LongestFirst(RolloutDataSourceWithBuffer):
    def __init__(self, dataset, args):
        super().__init__(dataset, args)

    def buffer_filter(self, args, buffer, num_samples):
        buffer.sort(key=lambda group: -len(group[0].prompt))
        taken = buffer[:num_samples]
        del buffer[:num_samples]
        return taken


class Curriculum(RolloutDataSourceWithBuffer):
    def __init__(self, args):
        super().__init__(args)
        self.metadata["level"] = 0

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        self.metadata["level"] += 1
        for group in groups:
            for sample in group:
                sample.metadata["level"] = self.metadata["level"]
        return groups


def newest_first(args, rollout_id, buffer, num_samples):
    taken = buffer[-num_samples:]
    del buffer[-num_samples:]
    return taken


# --- filters and hooks


def not_too_short(args, samples, **kwargs):
    lengths = [s.response_length for s in samples]
    return DynamicFilterOutput(keep=max(lengths) > 0, reason="empty", keep_when_insufficient=True)


def longest_only(args, data):
    for group in data:
        longest = max(group, key=lambda s: s.response_length)
        for sample in group:
            sample.remove_sample = sample is not longest


def count_all(args, all_samples, data_source):
    data_source.update_metadata({"seen": data_source.get_metadata().get("seen", 0) + len(all_samples)})


async def note_rollout(args, sample, *, rollout_id, evaluation):
    sample.metadata["noted"] = (rollout_id, evaluation)
    return sample


def shorten(args, sample):
    sample.metadata["shortened"] = True


# --- rewards and columns of the batch


def post_process(args, samples):
    raw_rewards = [sample.get_reward_value(args) for sample in samples]
    mean = sum(raw_rewards) / len(raw_rewards)
    return raw_rewards, [reward - mean for reward in raw_rewards]


def convert(args, samples):
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [1.0] * len(samples),
        "raw_reward": [sample.get_reward_value(args) for sample in samples],
        "truncated": [0] * len(samples),
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask or [1] * sample.response_length for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


# --- separate rollout and evaluation functions


async def _one(args, group, params):
    return [await rollout.generate_and_rm(args, sample, params.copy()) for sample in group]


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    assert not evaluation
    state = GenerateState(args)
    groups = data_source.get_samples(args.rollout_batch_size)
    done = [run(_one(args, group, state.sampling_params)) for group in groups]
    return RolloutFnTrainOutput(samples=done, metrics={"rollout/mine": len(done)})


def generate_rollout_plain(args, rollout_id, data_buffer, evaluation=False):
    return generate_rollout(args, rollout_id, data_buffer, evaluation).samples


def evaluate(args, rollout_id, data_source, evaluation=False):
    assert evaluation
    samples = []
    for i in range(3):
        sample = Sample(index=i, prompt="1+1=", label="2")
        sample = run(rollout.generate(args, sample, {"max_new_tokens": 4, "temperature": 0.0}))
        sample.reward = run(async_rm(args, sample))
        samples.append(sample)
    data = {"rewards": [s.reward for s in samples], "samples": samples}
    return RolloutFnEvalOutput(data={"sums": data | {"truncated": [False] * 3}}, metrics={"eval/mine": 1.0})


def evaluate_plain(args, rollout_id, data_source, evaluation=False):
    return {"sums": {"rewards": [1.0, 0.0], "truncated": [False, True]}}
