"""The generator of the task type ``math``: one answer per turn, graded by rule. Subclass it for other tasks.

Reads prompts from a file, asks the engines through the chat-completions route of their router, and writes every
finished conversation to the buffer service.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, TypeAlias
from uuid import uuid4

from openai import APIStatusError, DefaultHttpxClient, OpenAI

from slime.data.rows import read_file
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.utils.async_utils import run
from slime.utils.http_utils import DEFAULT_TIMEOUT_S, post

__all__ = [
    "SAMPLING_PARAMS",
    "TASK_TYPE",
    "BaseGenerator",
    "get_rule_based_math_reward",
    "query_single_turn",
    "run_rollout",
]

logger = logging.getLogger(__name__)

TASK_TYPE = "math"
SAMPLING_PARAMS = {"temperature": 1.0, "top_p": 1.0}

_RETRIES = 6
# Requests for one turn. A turn with more aborts ends with the reason ``abort``.
_ATTEMPTS = 6
# Status codes with which the engines refuse a prompt.
_REFUSED = range(400, 500)

Message: TypeAlias = dict[str, Any]
Item: TypeAlias = dict[str, Any]
RolloutFunc: TypeAlias = Callable[..., list[Message]]
"""``(client, messages, sampling_params[, tools])`` -> the whole conversation, see :func:`query_single_turn`."""
RewardFunc: TypeAlias = Callable[[Item], Any]
"""An item, which is the row of the file with ``messages``, -> its reward."""


def query_single_turn(
    client: OpenAI, messages: list[Message], sampling_params: dict[str, Any], tools: list[Any] | None = None
) -> list[Message]:
    """``messages`` and the assistant's answer. Its key ``finish_reason`` is the reason of its end."""
    body = {**sampling_params, **({"tools": tools} if tools else {})}
    asked, written = messages, ""
    for _ in range(_ATTEMPTS):
        reply = client.chat.completions.create(model="default", messages=asked, extra_body=body)  # type: ignore[arg-type]
        choice = reply.choices[0]
        written += choice.message.content or ""
        if str(choice.finish_reason) != "abort":
            break
        # Engines abort requests when their weights change: the next request continues the text.
        if written:
            asked = [*messages, {"role": "assistant", "content": written}]
            body["continue_final_message"] = True
        # The limit holds for the whole answer.
        if "max_tokens" in body:
            used = reply.usage.completion_tokens if reply.usage else 0
            body["max_tokens"] = max(1, body["max_tokens"] - used)
    answer = choice.message.model_dump(exclude_none=True) | ({"content": written} if written else {})
    return [*messages, answer | {"finish_reason": str(choice.finish_reason)}]


def get_rule_based_math_reward(item: Item) -> float:
    """1 if the box in the last message holds ``item["label"]``, else 0."""
    return float(grade_answer_verl(str(item["messages"][-1]["content"]), item.get("label")))


class BaseGenerator:
    """Answers every prompt ``num_repeat_per_sample`` times, ``num_process`` conversations at a time, in threads.

    Args:
        queue_size, task_type: not needed. Subclasses may read ``task_type``.
        num_repeats: passes over the file that :meth:`run` makes.
        skip_instance_ids: instances that are not answered again.
    """

    def __init__(
        self,
        remote_engine_url: str,
        remote_buffer_url: str,
        num_repeat_per_sample: int = 1,
        queue_size: int = 1000000,
        num_process: int = 10,
        task_type: str = "math",
        max_tokens: int = 4096,
        num_repeats: int = 10,
        skip_instance_ids: list[Any] | None = None,
        sampling_params: dict[str, Any] | None = None,
    ) -> None:
        self.remote_engine_url = remote_engine_url
        self.remote_buffer_url = remote_buffer_url
        self.num_repeat_per_sample = num_repeat_per_sample
        self.num_process = num_process
        self.task_type = task_type
        self.num_repeats = num_repeats
        self.sampling_params = SAMPLING_PARAMS | (sampling_params or {}) | {"max_tokens": max_tokens}
        self.skip_instance_ids = set(map(str, skip_instance_ids or []))
        self._passes = 0

    def entry(self, input_file: str, rollout_func: RolloutFunc, reward_func: RewardFunc, num_epoch: int = 1) -> None:
        """:meth:`run`, ``num_epoch`` times."""
        for _ in range(num_epoch):
            self.run(input_file, rollout_func, reward_func)

    def run(self, input_file: str, rollout_func: RolloutFunc, reward_func: RewardFunc) -> None:
        """Hold every conversation with ``rollout_func``, grade it with ``reward_func`` and send it to the buffer.

        A prompt that the engines refuse is left out. Any other exception ends the run.
        """
        rows = list(read_file(input_file))
        client = OpenAI(
            base_url=f"{self.remote_engine_url}/v1",
            api_key="none",
            max_retries=_RETRIES,
            timeout=DEFAULT_TIMEOUT_S,
            # Engines are reached without the proxy of the environment.
            http_client=DefaultHttpxClient(trust_env=False),
        )
        failed = Event()

        def answer(instance_id: str, row: Item) -> None:
            # Another conversation has failed, and the run ends.
            if failed.is_set():
                return
            try:
                self._one(client, instance_id, row, rollout_func, reward_func)
            except BaseException:
                failed.set()
                raise

        with client, ThreadPoolExecutor(self.num_process, thread_name_prefix="rollout-buffer") as pool:
            for _ in range(self.num_repeats):
                named = list(self._named(rows))
                self._passes += 1
                for future in [pool.submit(answer, *one) for one in named]:
                    future.result()

    def send_data_to_buffer(self, data: Item) -> None:
        """Write an item with ``instance_id``, ``messages`` and ``reward`` to the service."""
        run(post(f"{self.remote_buffer_url}/buffer/write", data, max_retries=_RETRIES))

    def _named(self, rows: list[Item]) -> Iterator[tuple[str, Item]]:
        for number, row in enumerate(rows):
            # With the number of the pass: each pass makes new groups.
            name = f"{self._passes}-{row.get('instance_id', number)}"
            if name not in self.skip_instance_ids:
                yield from ((name, row) for _ in range(self.num_repeat_per_sample))

    def _one(
        self, client: OpenAI, instance_id: str, row: Item, rollout_func: RolloutFunc, reward_func: RewardFunc
    ) -> None:
        prompt = row.get("prompt", row.get("input"))
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
        tools = [row["tools"]] if row.get("tools") else []
        try:
            messages = rollout_func(client, asked, dict(self.sampling_params), *tools)
        except APIStatusError as error:
            if error.status_code not in _REFUSED:
                raise
            # the others go on, and the trainer gets groups that are complete
            logger.warning("instance %s is left out: %s", instance_id, error)
            return
        last = dict(messages[-1])
        info = {"timestamp": time.time(), "finish_reason": last.pop("finish_reason", "stop")}
        info["round_number"] = sum(message["role"] == "assistant" for message in messages)
        item = row | {"uid": uuid4().hex, "instance_id": instance_id, "messages": [*messages[:-1], last]}
        item["extra_info"] = (row.get("extra_info") or {}) | info
        self.send_data_to_buffer(item | {"reward": reward_func(item)})


def run_rollout(data: dict[str, Any], kind: type[BaseGenerator] = BaseGenerator) -> None:
    """Called by the service with the payload of ``/start_rollout``. Numbers may be text."""
    generator = kind(
        data["remote_engine_url"],
        data["remote_buffer_url"],
        num_repeat_per_sample=int(data.get("num_repeat_per_sample", 1)),
        num_process=int(data.get("num_process", 10)),
        task_type=data.get("task_type", TASK_TYPE),
        max_tokens=int(data.get("max_tokens", 4096)),
        num_repeats=1,
        sampling_params=data.get("sampling_params"),
        skip_instance_ids=data.get("skip_instance_ids"),
    )
    num_epoch = int(data.get("num_epoch", 1))
    generator.entry(data["input_file"], query_single_turn, get_rule_based_math_reward, num_epoch)
