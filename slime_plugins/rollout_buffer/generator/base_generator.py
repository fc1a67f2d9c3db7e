"""The generator of the task type ``math``: one answer per turn, graded by rule. Subclass it for tasks of your own.

Reads prompts from a JSONL file, asks the engines through the chat-completions route of their router, and writes every
finished conversation to the buffer service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from uuid import uuid4

from slime.data.prompts import read_file
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.utils.errors import RequestRefused
from slime.utils.http_utils import post

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
_ATTEMPTS = 6
"""Requests for one turn; a turn that is given up more often ends with the reason ``abort``."""


async def query_single_turn(
    url: str, messages: list[dict[str, Any]], sampling_params: dict[str, Any], tools: list[Any] | None = None
) -> tuple[dict[str, Any], str]:
    """(the assistant's message, finish reason) of one turn, asked for at ``url``/v1/chat/completions.

    Engines give requests up when their weights change: then they are asked to go on where they stopped.
    """
    body = {"model": "default", "messages": messages, **sampling_params} | ({"tools": tools} if tools else {})
    written = ""
    for _ in range(_ATTEMPTS):
        reply = await post(f"{url}/v1/chat/completions", body, max_retries=_RETRIES)
        choice = reply["choices"][0]
        message, reason = dict(choice["message"]), str(choice.get("finish_reason"))
        written += message.get("content") or ""
        if reason != "abort":
            break
        so_far = {"role": "assistant", "content": written}
        if written:
            body |= {"messages": [*messages, so_far], "continue_final_message": True}
        if "max_tokens" in body:
            used = int((reply.get("usage") or {}).get("completion_tokens") or 0)
            body["max_tokens"] = max(1, body["max_tokens"] - used)
    return message | ({"content": written} if written else {}), reason


def get_rule_based_math_reward(item: dict[str, Any]) -> float:
    """1 when the box in the last message holds ``item["label"]``, else 0."""
    return float(grade_answer_verl(str(item["messages"][-1]["content"]), item.get("label")))


class BaseGenerator:
    """Answers every prompt ``num_repeat_per_sample`` times, ``num_process`` conversations at a time."""

    def __init__(
        self,
        remote_engine_url: str,
        remote_buffer_url: str,
        num_repeat_per_sample: int = 1,
        num_process: int = 10,
        max_tokens: int = 4096,
        num_epoch: int = 1,
        sampling_params: dict[str, Any] | None = None,
        skip_instance_ids: list[Any] | None = None,
    ) -> None:
        self.engine_url = remote_engine_url
        self.buffer_url = remote_buffer_url
        self.num_repeat = num_repeat_per_sample
        self.num_process = num_process
        self.num_epoch = num_epoch
        self.sampling_params = SAMPLING_PARAMS | (sampling_params or {}) | {"max_tokens": max_tokens}
        self.skipped = set(map(str, skip_instance_ids or []))

    async def converse(self, row: dict[str, Any]) -> dict[str, Any]:
        """One conversation: messages, reward, and what is known about its end. Override it for several turns."""
        prompt = row.get("prompt", row.get("input"))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
        answer, reason = await query_single_turn(self.engine_url, messages, self.sampling_params, row.get("tools"))
        item = {"messages": [*messages, answer], "label": row.get("label")}
        return item | {"reward": get_rule_based_math_reward(item), "extra_info": {"finish_reason": reason}}

    def run(self, input_file: str) -> None:
        """Until every prompt is answered ``num_epoch`` times."""
        asyncio.run(self._run(list(read_file(input_file))))

    async def _run(self, rows: list[dict[str, Any]]) -> None:
        places = asyncio.Semaphore(self.num_process)

        async def one(instance_id: str, row: dict[str, Any]) -> None:
            async with places:
                try:
                    item = await self.converse(row)
                except RequestRefused as error:  # the others go on, and the trainer gets groups that are complete
                    logger.warning("instance %s is left out: %s", instance_id, error)
                    return
                item["extra_info"] = {"timestamp": time.time(), "round_number": 1} | item.get("extra_info", {})
                item |= {"uid": uuid4().hex, "instance_id": instance_id}
                await post(f"{self.buffer_url}/buffer/write", item, max_retries=_RETRIES)

        for epoch in range(self.num_epoch):
            named = [(f"{epoch}-{row.get('instance_id', number)}", row) for number, row in enumerate(rows)]
            todo = [(name, row) for name, row in named if name not in self.skipped for _ in range(self.num_repeat)]
            async with asyncio.TaskGroup() as group:
                for name, row in todo:
                    group.create_task(one(name, row))


def run_rollout(data: dict[str, Any], kind: type[BaseGenerator] = BaseGenerator) -> None:
    """What the service calls with the payload of ``/start_rollout``; numbers may be text."""
    generator = kind(
        data["remote_engine_url"],
        data["remote_buffer_url"],
        num_repeat_per_sample=int(data.get("num_repeat_per_sample", 1)),
        num_process=int(data.get("num_process", 10)),
        max_tokens=int(data.get("max_tokens", 4096)),
        num_epoch=int(data.get("num_epoch", 1)),
        sampling_params=data.get("sampling_params"),
        skip_instance_ids=data.get("skip_instance_ids"),
    )
    generator.run(data["input_file"])
