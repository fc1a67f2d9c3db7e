"""Flags of engines and router that slime itself reads; ``--sglang-*`` and ``--router-*`` are in ``namespace``."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["EngineArgs"]


@dataclass(frozen=True)
class EngineArgs:
    """Inference engines; --sglang-<flag> is any flag of the server, --router-<flag> of the router."""

    sglang_router_ip: str | None = field(
        default=None,
        metadata={
            "help": "Address of a router that runs already, together with its port. Default: slime starts one per run."
        },
    )
    sglang_router_port: int | None = field(
        default=None, metadata={"help": "Port of the router; any free one by default."}
    )
    sglang_router_request_timeout_secs: int = field(
        default=14400, metadata={"help": "Seconds the router waits for an engine's answer."}
    )
    sglang_server_concurrency: int = field(default=512, metadata={"help": "Samples generated at once, per engine."})
    sglang_config: str | None = field(
        default=None, metadata={"metavar": "FILE", "help": "YAML file of models and groups of engines to serve them."}
    )
    prefill_num_servers: int | None = field(
        default=None, metadata={"help": "Engines that only prefill; the others only decode."}
    )
    engine_start_timeout: float = field(default=300.0, metadata={"help": "Seconds until an engine must be healthy."})
