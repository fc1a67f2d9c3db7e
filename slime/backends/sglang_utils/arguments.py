"""Flags of engines and router that slime itself reads; ``--sglang-*`` and ``--router-*`` are in ``namespace``."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field

from slime.utils.errors import ConfigError

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


def validate_args(args: Namespace) -> None:
    """Derive and check what is about engines, for parsers of one's own; ``parse_args`` has done it already.

    Raises:
        ConfigError: with every problem.
    """
    from slime.backends.sglang_utils import rules

    rules.engine_width(args)
    for step in rules.STEPS:
        step(args)
    problems = [problem for rule in rules.RULES for problem in rule(args)]
    if problems:
        raise ConfigError(problems)
