"""What follows from the engine's flags, and what they must satisfy. B70-B74 and D6 of the table of rules.

:func:`engine_width` runs before every other derivation, because the others count engines with its result; :data:`STEPS`
run after them. Called by ``slime.ray.arguments``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator

from slime.backends.sglang_utils.option_table import ALIASES
from slime.backends.sglang_utils.topology import Topology, WorkerType, topology_of
from slime.config import notices
from slime.utils.errors import ConfigError
from slime.utils.net import url_host

__all__ = ["RULES", "STEPS", "engine_width"]

Step = Callable[[Namespace], None]
Rule = Callable[[Namespace], Iterator[str]]

_WIDTH = "--rollout-num-gpus-per-engine"


def engine_width(args: Namespace) -> None:
    """D6: ``--sglang-tp-size`` times the pipeline's size is the width of an engine where nothing else says it."""
    if "sglang_tp_size" not in args.given or "rollout_num_gpus_per_engine" in args.given:
        return
    args.rollout_num_gpus_per_engine = args.sglang_tp_size * args.sglang_pp_size
    args.given |= {"rollout_num_gpus_per_engine"}
    notices.info(args, _WIDTH, f"{args.rollout_num_gpus_per_engine}, from --sglang-tp-size {args.sglang_tp_size}")


def _parallel_sizes(args: Namespace) -> None:
    """B71: the tensor-parallel size follows; B70: every size is readable under both of its names."""
    if "sglang_tp_size" not in args.given:
        args.sglang_tp_size = args.rollout_num_gpus_per_engine // max(1, args.sglang_pp_size)
    for name, alias in ALIASES.items():
        setattr(args, alias, getattr(args, name))


def _router_address(args: Namespace) -> None:
    """B73: an IPv6 address stands in brackets in a URL."""
    if args.sglang_router_ip is not None:
        args.sglang_router_ip = url_host(args.sglang_router_ip)


STEPS: tuple[Step, ...] = (_parallel_sizes, _router_address)


def _sizes(args: Namespace) -> Iterator[str]:
    width, tp, pp, dp = args.rollout_num_gpus_per_engine, args.sglang_tp_size, args.sglang_pp_size, args.sglang_dp_size
    if min(tp, pp, dp) < 1:
        yield f"--sglang-tp-size {tp}, --sglang-pp-size {pp} and --sglang-dp-size {dp} must all be at least 1."
        return
    if width % pp:
        yield f"{_WIDTH} {width} must be a multiple of --sglang-pp-size {pp}."
    elif tp * pp != width:  # D6
        yield (
            f"--sglang-tp-size {tp} times --sglang-pp-size {pp} is {tp * pp}, but {_WIDTH} is {width}. Leave "
            f"--sglang-tp-size out: it follows."
        )
    if pp > 1:
        yield f"--sglang-pp-size {pp} is not supported yet: weights reach engines of one pipeline stage only."
    if dp > 1 and not args.sglang_enable_dp_attention:
        yield (
            f"--sglang-dp-size {dp} needs --sglang-enable-dp-attention: several copies of a model are several engines "
            f"here, see {_WIDTH}."
        )
    elif dp > 1 and tp % dp:
        yield f"--sglang-dp-size {dp} must divide the tensor-parallel size {tp} of an engine."


def _router(args: Namespace) -> Iterator[str]:
    if args.sglang_router_ip is not None and args.sglang_router_port is None:
        yield (
            f"--sglang-router-ip {args.sglang_router_ip} needs --sglang-router-port: together they name a router that "
            f"runs already. The address of a router that slime starts is that of its node, or SLIME_HOST_IP there."
        )
    if args.sglang_router_port is not None and not 0 < args.sglang_router_port < 65536:
        yield f"--sglang-router-port {args.sglang_router_port} must be between 1 and 65535."


def _exclusions(args: Namespace) -> Iterator[str]:
    sources = {
        "--rollout-external-engine-addrs": args.rollout_external_engine_addrs,
        "--sglang-config": args.sglang_config,
        "--prefill-num-servers": args.prefill_num_servers,
    }
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:  # B74
        yield f"{' and '.join(given)} exclude each other: each says which engines there are. Keep one."


def _prefill(args: Namespace) -> Iterator[str]:
    count, width, total = args.prefill_num_servers, args.rollout_num_gpus_per_engine, args.rollout_num_gpus
    if count is None:
        return
    if count < 1:
        yield f"--prefill-num-servers {count} must be at least 1, or be left out."
    elif total is not None and count * width >= total:
        yield (
            f"--prefill-num-servers {count} takes {count * width} of --rollout-num-gpus {total}, {_WIDTH} being "
            f"{width}: nothing is left to decode with."
        )


def _deployment(args: Namespace) -> Iterator[str]:
    """B78 and what :mod:`slime.backends.sglang_utils.topology` finds in the file."""
    if args.sglang_config is None or args.debug_train_only:
        return
    try:
        topology = topology_of(args)
    except ConfigError as error:
        yield from error.problems
        return
    for warning in topology.warnings:
        notices.warn(args, "--sglang-config", warning)
    if args.rollout_num_gpus is not None and topology.num_gpus != args.rollout_num_gpus:
        yield (
            f"--sglang-config {args.sglang_config}: its groups have {topology.num_gpus} devices, --rollout-num-gpus is "
            f"{args.rollout_num_gpus}: they must be equal."
        )
    yield from _not_yet(args, topology)


def _not_yet(args: Namespace, topology: Topology) -> Iterator[str]:
    start = f"--sglang-config {args.sglang_config}"
    if len(topology.models) > 1:
        yield f"{start}: {len(topology.models)} models are not supported yet: one is served."
    for model in topology.models:
        where = f"{start}: model {model.name}"
        if not model.updates_weights:
            yield f"{where}: update_weights: false is not supported yet: every engine receives the trained weights."
        for kind in sorted({group.worker_type for group in model.groups} - {WorkerType.REGULAR}):
            yield f"{where}: worker_type {kind} is not supported yet: engines are regular ones."
        if len(model.groups) != 1:
            yield f"{where}: {len(model.groups)} groups are not supported yet: there must be one."
        for width in sorted({group.num_gpus_per_engine for group in model.groups} - {args.rollout_num_gpus_per_engine}):
            yield f"{where}: num_gpus_per_engine {width} must be {_WIDTH} {args.rollout_num_gpus_per_engine} so far."


RULES: tuple[Rule, ...] = (_sizes, _router, _exclusions, _prefill, _deployment)
