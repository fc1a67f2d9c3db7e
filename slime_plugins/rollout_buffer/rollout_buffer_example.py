"""A rollout function that trains on the trajectories of the rollout buffer service.

    --rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout
    --rollout-buffer-url http://127.0.0.1:8889 --rollout-task-type math

The first call starts the service's generator, unless the generator of the run before this one still works.
Conversations that were trained on are skipped. Trajectories of the service go into the Data Buffer before the next
request, and more than a batch of them waits there. Tokens are made from the conversations, so the engine's log-probs
are unknown and the trainer computes the old log-probs.
"""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from typing import Any
from uuid import uuid4

from slime.data.loss_masks import MultiTurnLossMaskGenerator
from slime.data.processing import load_tokenizer
from slime.data.sample import Sample, SampleGroup
from slime.rollout import sglang_rollout
from slime.utils.async_utils import Deadline, call_in_thread, run
from slime.utils.errors import ConfigError, DataError, EngineError
from slime.utils.http_utils import init_http_client, post

__all__ = ["generate_rollout", "make_sample"]

logger = logging.getLogger(__name__)

_WAIT_S = 20.0
_FINISHED, _SURPLUS, _COUNT = "finished_instance_ids", "rollout_buffer_surplus", "rollout_buffer_groups"

# Service -> replies that this process has received. An entry means that its generator is started.
_replies: dict[str, int] = {}


@functools.cache
def _client() -> str:
    """This process, to a service."""
    return uuid4().hex


@functools.lru_cache(maxsize=2)
def _mask_generator(hf_checkpoint: str, loss_mask_type: str) -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(load_tokenizer(hf_checkpoint, trust_remote_code=True), loss_mask_type)


def make_sample(args: Namespace, item: dict[str, Any]) -> Sample:
    """A trajectory as a training row, trained on the tokens of the assistant."""
    generator = _mask_generator(args.hf_checkpoint, args.loss_mask_type)
    ids, mask = generator.get_loss_mask(item["messages"])
    mask[0] = 0  # nothing predicts the first token
    length = generator.get_response_lengths([mask])[0]
    if length == 0:
        raise DataError(f"trajectory {item.get('uid')} of the rollout buffer has no assistant message to train on")
    sample = Sample(prompt=item["messages"][:-1], response=str(item["messages"][-1].get("content")))
    sample.tokens, sample.response_length, sample.loss_mask = list(ids), length, list(mask[-length:])
    sample.reward, sample.label = item["reward"], item.get("label")
    info = dict(item.get("extra_info") or {})
    sample.metadata = info | {"uid": item.get("uid"), "instance_id": item["instance_id"]}
    is_cut = info.get("finish_reason") in ("length", "abort")
    sample.status = Sample.Status.TRUNCATED if is_cut else Sample.Status.COMPLETED
    return sample


async def _start(args: Namespace, finished: list[str]) -> None:
    if args.rollout_buffer_url in _replies:
        return
    payload = {
        "task_type": args.rollout_task_type,
        "input_file": args.prompt_data,
        "remote_engine_url": f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
        "remote_buffer_url": args.rollout_buffer_url,
        "num_repeat_per_sample": str(args.n_samples_per_prompt),
        "num_process": str(args.sglang_server_concurrency),
        "num_epoch": str(args.num_epoch or 1),
        "max_tokens": str(args.rollout_max_response_len),
        "sampling_params": {"temperature": args.rollout_temperature, "top_p": args.rollout_top_p},
        "tokenizer_path": args.hf_checkpoint,
        "skip_instance_ids": finished,
        "start_id": _client(),
    }
    reply = await post(f"{args.rollout_buffer_url}/start_rollout", payload, max_retries=_retries(args))
    if reply.get("success") is False:
        raise ConfigError(f"--rollout-task-type {args.rollout_task_type}: {reply['message']}")
    _replies[args.rollout_buffer_url] = 0


def _retries(args: Namespace) -> int:
    times: int = args.fetch_trajectory_retry_times
    return 60 if times < 0 else times  # a request has a deadline as well


async def _fetch(args: Namespace, deadline: Deadline, progress: str) -> dict[str, list[Sample]]:
    """The groups of the next reply that has any, by instance."""
    while True:
        if deadline.remaining <= 0:
            raise deadline.error(progress)
        # The service sends the same reply until ``received`` is higher.
        request = {"wait_s": _WAIT_S, "client": _client(), "received": _replies[args.rollout_buffer_url]}
        reply = await post(f"{args.rollout_buffer_url}/get_rollout_data", request, max_retries=_retries(args))
        items = reply["data"]["data"]
        if items:
            break
        if reply.get("message", "").startswith("the generator ended"):
            raise EngineError(
                f"--rollout-buffer-url {args.rollout_buffer_url}: {reply['message']}. {progress}; --num-epoch says how "
                "often every prompt is answered"
            )
    groups: dict[str, list[Sample]] = {}
    for item in items:
        groups.setdefault(str(item["instance_id"]), []).append(make_sample(args, item))
    return groups


async def _batch(args: Namespace, data_buffer: Any) -> list[SampleGroup]:
    notes = await call_in_thread(data_buffer.get_metadata)
    finished, surplus, count = list(notes.get(_FINISHED, [])), notes.get(_SURPLUS, 0), notes.get(_COUNT, 0)
    await _start(args, finished)
    limit_s, flag = args.rollout_request_timeout, "--rollout-request-timeout"
    if limit_s is None:
        limit_s, flag = args.rollout_timeout, "--rollout-timeout"
    deadline = Deadline(limit_s, "the next group of the rollout buffer", flag)
    size = args.n_samples_per_prompt
    while surplus < args.rollout_batch_size:
        fetched = await _fetch(args, deadline, f"{surplus} of {args.rollout_batch_size} groups are there")
        groups: list[SampleGroup] = []
        for number, samples in enumerate(fetched.values(), start=count):
            for position, sample in enumerate(samples[:size]):
                sample.group_index, sample.index = number, number * size + position
            groups.append(list(samples[:size]))
        await call_in_thread(data_buffer.add_samples, groups)
        finished, surplus, count = [*finished, *fetched], surplus + len(groups), count + len(groups)
        notes = {_FINISHED: finished, _SURPLUS: surplus, _COUNT: count}
        await call_in_thread(data_buffer.update_metadata, notes)
        # Only now: until the groups are in the Data Buffer, the service must keep them.
        _replies[args.rollout_buffer_url] += 1
    batch: list[SampleGroup] = await call_in_thread(data_buffer.get_samples, args.rollout_batch_size)
    await call_in_thread(data_buffer.update_metadata, {_SURPLUS: surplus - args.rollout_batch_size})
    return batch


def generate_rollout(args: Namespace, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """The next batch of the service's trajectories. Evaluations are made by the default rollout function.

    Raises:
        ConfigError: no ``--rollout-buffer-url``, or an unknown task type.
        EngineError: the service or its generator failed.
    """
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_buffer, evaluation=True)
    if not args.rollout_buffer_url:
        raise ConfigError("this rollout function needs --rollout-buffer-url, the address of the rollout buffer service")
    init_http_client(args)
    return run(_batch(args, data_buffer))
