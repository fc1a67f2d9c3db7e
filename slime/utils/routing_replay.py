"""Public name of :mod:`slime.backends.megatron_utils.routing_replay`, for routers of users' models."""

from slime.backends.megatron_utils.routing_replay import (
    RoutingReplay,
    get_routing_replay_compute_topk,
    register_routing_replay,
)

__all__ = ["RoutingReplay", "get_routing_replay_compute_topk", "register_routing_replay"]
