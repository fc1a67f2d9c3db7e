"""A shop with the interface of tau-bench's environments and a user who follows a script. No server, no language model.

The user wants an order cancelled and names it only when asked. The task is done when this order and no other is
cancelled at the end of the conversation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from examples.tiny.tools import NAMES

__all__ = ["ASK", "WIKI", "WISH", "Action", "RetailEnv", "get_env"]

ASK, DONE, WISH, WIKI = "which?", "done", "cancel my order", "shop"
RESPOND = "respond"
_PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@dataclass
class Action:
    """A tool call, or ``respond`` with ``content``."""

    name: str
    kwargs: dict[str, Any]


@dataclass
class EnvResetResponse:
    observation: str
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class EnvResponse:
    observation: str
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)


class RetailEnv:
    """Task ``i`` is about the order with the ``i``-th name."""

    tools_info = (
        {"type": "function", "function": {"name": "cancel", "description": "Cancel it.", "parameters": _PARAMETERS}},
    )
    wiki = WIKI

    def reset(self, task_index: int) -> EnvResetResponse:
        self.wanted = NAMES[task_index]
        self.cancelled: list[str] = []
        return EnvResetResponse(WISH)

    def step(self, action: Action) -> EnvResponse:
        if action.name == RESPOND:
            if action.kwargs["content"] == ASK:
                return EnvResponse(self.wanted, 0.0, False)
            # Equality with a list of one order: cancelling more than the wanted order is wrong too.
            return EnvResponse("###STOP###", float(self.cancelled == [self.wanted]), True)
        name = action.kwargs.get("name")
        if action.name != "cancel" or name not in NAMES:
            return EnvResponse("error", 0.0, False)
        self.cancelled.append(str(name))
        return EnvResponse("ok", 0.0, False)


def get_env(args: Any, task_index: int) -> RetailEnv:
    return RetailEnv()
