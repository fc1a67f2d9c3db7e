"""Flags of engines and router that slime itself reads; every other ``--sglang-*`` flag goes to SGLang as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["EngineArgs"]


@dataclass(frozen=True)
class EngineArgs:
    """Inference engines."""

    sglang_router_ip: str | None = field(default=None, metadata={"help": "Address of the router; loopback by default."})
    sglang_router_port: int | None = field(
        default=None, metadata={"help": "Port of the router; any free one by default."}
    )
    sglang_router_request_timeout_secs: int = field(
        default=14400, metadata={"help": "Seconds the router waits for an engine's answer."}
    )
    router_policy: Literal["cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing"] = field(
        default="cache_aware", metadata={"help": "How the router chooses an engine."}
    )
    sglang_server_concurrency: int = field(default=512, metadata={"help": "Samples generated at once, per engine."})
    engine_start_timeout: float = field(default=300.0, metadata={"help": "Seconds until an engine must be healthy."})
