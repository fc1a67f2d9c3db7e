"""Derivations from the engine's flags, and rules about them.

:func:`engine_width` and :func:`engine_devices` run before every other derivation, because these count engines.
:data:`STEPS` run after them. :data:`LIVE_STEPS` ask external engines and run only when the run really starts.
:data:`RULES` are independent of the machine, so a plan works anywhere. :data:`MACHINE_RULES` are about the machine that
starts the run. Called by ``slime.ray.arguments``.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from slime.backends import weights_dtype
from slime.backends.sglang_utils.engine import START_TIMEOUT_S
from slime.backends.sglang_utils.external import ONE_STAGE, ExternalEngineInfo, discover_external_engines, problems_of
from slime.backends.sglang_utils.feature_rules import adapter_of_model, drafts_on_cpu, experts_on_cpu, served_adapter
from slime.backends.sglang_utils.option_table import ALIASES
from slime.backends.sglang_utils.topology import ModelSpec, Topology, WorkerType, num_stages, topology_of
from slime.config import groups
from slime.config.groups import from_args
from slime.data.engine_fields import FieldFlags
from slime.models.config_json import read_model_config, text_part
from slime.utils import accelerator
from slime.utils.errors import ConfigError
from slime.utils.net import url_host

Step = Callable[[Namespace], None]
Rule = Callable[[Namespace], Iterator[str]]

_WIDTH = "--rollout-num-gpus-per-engine"
_EXTERNAL = "--rollout-external-engine-addrs"
_READY_S = 600.0  # of an engine's start, besides the reading of its weights
_SLOW_BYTES_PER_S = 200e6
_LOOPBACK = ("127.", "localhost", "[::1]")


def engine_width(args: Namespace) -> None:
    """Derive the width of an engine from ``--sglang-tp-size`` and the pipeline's size."""
    if "sglang_tp_size" not in args.given or "rollout_num_gpus_per_engine" in args.given:
        return
    args.rollout_num_gpus_per_engine = args.sglang_tp_size * args.sglang_pp_size
    args.given |= {"rollout_num_gpus_per_engine"}
    groups.info(args, _WIDTH, f"{args.rollout_num_gpus_per_engine}, from --sglang-tp-size {args.sglang_tp_size}")


def engine_devices(args: Namespace) -> None:
    """Derive ``--rollout-num-gpus`` from ``--sglang-config``, which lists every device of the engines."""
    if args.sglang_config is None or args.rollout_num_gpus is not None or args.colocate or args.debug_train_only:
        return
    try:
        args.rollout_num_gpus = topology_of(args).num_gpus
    except ConfigError:  # a rule reports it
        return
    groups.info(args, "--rollout-num-gpus", f"{args.rollout_num_gpus}: all devices of --sglang-config")


def _parallel_sizes(args: Namespace) -> None:
    """Derive the tensor-parallel size, and make every size readable under both of its names."""
    if "sglang_tp_size" not in args.given:
        args.sglang_tp_size = args.rollout_num_gpus_per_engine // max(1, args.sglang_pp_size)
    # users' code may read either name
    for name, alias in ALIASES.items():
        setattr(args, alias, vars(args)[name])


def _router_address(args: Namespace) -> None:
    """Put an IPv6 address in brackets, as in a URL."""
    if args.sglang_router_ip is not None:
        args.sglang_router_ip = url_host(args.sglang_router_ip)


def _num_engines(args: Namespace) -> None:
    """Count the engines that answer requests, if the number does not follow from the devices."""
    if args.debug_train_only:
        return
    if args.rollout_external_engine_addrs is not None:
        if args.rollout_num_gpus is not None and "rollout_num_gpus" in args.given:
            groups.warn(args, "--rollout-num-gpus", f"no effect: {_EXTERNAL} says which engines there are")
        args.rollout_num_engines = len(args.rollout_external_engine_addrs)
        args.rollout_num_gpus = args.rollout_num_engines * args.rollout_num_gpus_per_engine
    elif args.sglang_config is not None or args.prefill_num_servers is not None:
        try:
            args.rollout_num_engines = topology_of(args).models[0].num_answering
        except ConfigError:  # a rule reports it, with everything else that is wrong
            return


def _external_engines(args: Namespace) -> None:
    """Derive the numbers of external engines and devices from the answers of the engines."""
    if args.rollout_external_engine_addrs is None or args.debug_train_only:
        return
    if not args.rollout_external_engine_addrs:
        raise ConfigError(f"{_EXTERNAL} names no engine: give HOST:PORT of one or more, or leave it out.")
    infos = discover_external_engines(args.rollout_external_engine_addrs)
    args.rollout_external_engine_infos = [asdict(info) for info in infos]
    args.rollout_num_engines = len(infos)
    args.rollout_num_gpus = sum(info.num_gpus for info in infos)


def _dtype(args: Namespace) -> None:
    """Derive the precision of the engines from the trainer's."""
    # Otherwise SGLang takes the precision of config.json and rounds the weights that it receives.
    starts_engines = not args.debug_train_only and args.rollout_external_engine_addrs is None
    if not starts_engines or "sglang_dtype" in args.given or args.sglang_quantization is not None:
        return
    config = read_model_config(args.hf_checkpoint)
    config |= text_part(config)
    # a quantized checkpoint has the precision that its kernels need
    if config.get("quantization_config") or config.get("compression_config"):
        return
    args.sglang_dtype = weights_dtype(fp16=args.fp16, fp32=args.fp32)
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored not in (None, args.sglang_dtype):
        text = f"{args.sglang_dtype}, the trainer's precision; --hf-checkpoint says {stored}"
        groups.info(args, "--sglang-dtype", text)


def _start_limit(args: Namespace) -> None:
    """Derive the time limit of an engine's start from the bytes that it reads, at the speed of a slow file system."""
    if args.engine_start_timeout is not None:
        return
    try:
        paths = {model.model_path for model in topology_of(args).models}
    except ConfigError:  # a rule reports it
        paths = set()
    num_bytes = max((_num_bytes(path) for path in paths if path is not None), default=0)
    args.engine_start_timeout = max(START_TIMEOUT_S, _READY_S + num_bytes / _SLOW_BYTES_PER_S)
    if args.engine_start_timeout > START_TIMEOUT_S:
        text = f"{args.engine_start_timeout:.0f} s, to read {num_bytes / 1e12:.1f} TB"
        groups.info(args, "--engine-start-timeout", text)


def _num_bytes(hf_checkpoint: str) -> int:
    """Bytes of the weight files of a checkpoint. 0 if it is not a directory of this machine."""
    files = [path for pattern in ("*.safetensors", "*.bin") for path in Path(hf_checkpoint).glob(pattern)]
    return sum(path.stat().st_size for path in files if path.is_file())


STEPS: tuple[Step, ...] = (_parallel_sizes, _router_address, _num_engines, _dtype, _start_limit)
LIVE_STEPS: tuple[Step, ...] = (_external_engines,)


def _sizes(args: Namespace) -> Iterator[str]:
    width, tp, pp, dp = args.rollout_num_gpus_per_engine, args.sglang_tp_size, args.sglang_pp_size, args.sglang_dp_size
    if min(pp, dp) < 1 or (tp < 1 and "sglang_tp_size" in args.given):
        yield f"--sglang-tp-size {tp}, --sglang-pp-size {pp} and --sglang-dp-size {dp} must all be at least 1."
        return
    if width % pp:
        yield f"{_WIDTH} {width} must be a multiple of --sglang-pp-size {pp}."
    elif tp * pp != width:
        yield (
            f"--sglang-tp-size {tp} times --sglang-pp-size {pp} is {tp * pp}, but {_WIDTH} is {width}. Leave "
            f"--sglang-tp-size out: it follows."
        )
    if pp > 1 and args.sglang_config is None and args.rollout_external_engine_addrs is None:
        yield from _stages(args, f"--sglang-pp-size {pp}", is_updated=True)
    if dp > 1 and not args.sglang_enable_dp_attention:
        yield (
            f"--sglang-dp-size {dp} needs --sglang-enable-dp-attention: several copies of a model are several engines "
            f"here, see {_WIDTH}."
        )
    elif dp > 1 and tp % dp:
        yield f"--sglang-dp-size {dp} must divide the tensor-parallel size {tp} of an engine."


def _stages(args: Namespace, start: str, *, is_updated: bool) -> Iterator[str]:
    """Features that do not work on engines with several pipeline stages."""
    if args.debug_train_only:
        return
    if is_updated and not args.debug_rollout_only:
        yield (
            f"{start}: an engine with pipeline stages cannot receive trained weights: {ONE_STAGE}. Use wider engines "
            f"({_WIDTH}). Stages are for --debug-rollout-only and models of --sglang-config with update_weights: false."
        )
    if args.offload_rollout:
        yield (
            f"{start} does not work with --offload-rollout (--colocate): only the first stage of an SGLang engine "
            "confirms that it has released its memory. Drop one of them."
        )
    if is_updated and args.use_rollout_routing_replay:
        yield (
            f"{start} does not work with --use-rollout-routing-replay: SGLang drops the expert choices of later "
            "stages (scheduler_pp_mixin.py). Drop one of them."
        )


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
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other: each says which engines there are. Keep one."


def _language_only(args: Namespace) -> Iterator[str]:
    """Refuse trained engines without a vision tower: the encoder server, which has it, cannot receive weights."""
    is_trained = not (args.debug_rollout_only or args.debug_train_only)
    for name in ("language_only", "encoder_only"):
        if is_trained and vars(args)[f"sglang_{name}"]:
            yield (
                f"--sglang-{name.replace('_', '-')}: SGLang's encoder server has no request that updates its weights. "
                "Images would be encoded with the first weights. Leave it out: an engine encodes images itself."
            )


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
    """The file is valid (:mod:`slime.backends.sglang_utils.topology`) and matches the devices."""
    if args.sglang_config is None or args.debug_train_only:
        return
    try:
        topology = topology_of(args)
    except ConfigError as error:
        yield from error.problems
        return
    for warning in topology.warnings:
        groups.warn(args, "--sglang-config", warning)
    if args.rollout_num_gpus is not None and topology.num_gpus != args.rollout_num_gpus:
        yield (
            f"--sglang-config {args.sglang_config}: its groups have {topology.num_gpus} devices, --rollout-num-gpus is "
            f"{args.rollout_num_gpus}: they must be equal."
        )
    yield from _node_borders(args, topology)
    yield from _models(args, topology)


def _node_borders(args: Namespace, topology: Topology) -> Iterator[str]:
    """Refuse engines that would be on parts of two nodes."""
    # Slots are assigned in node order, the trainer's first.
    per_node = args.num_gpus_per_node
    before = 0 if args.colocate or args.debug_rollout_only else args.world_size
    for name, places in topology.places(args.hf_checkpoint).items():
        for place in places:
            first = (before + place.first_slot) % per_node
            if first and place.num_gpus > per_node:
                yield (
                    f"--sglang-config {args.sglang_config}: engine {place.rank} of model {name}, with "
                    f"{place.num_gpus} devices, would begin in the middle of a node of --num-gpus-per-node {per_node}: "
                    "put a placeholder before it."
                )
                return
            if first + place.num_gpus > per_node >= place.num_gpus:
                text = f"engine {place.rank} of model {name} would be on two nodes of --num-gpus-per-node {per_node}"
                groups.warn(args, "--sglang-config", f"{text}, which does not work: put a placeholder before it")
                return


def _models(args: Namespace, topology: Topology) -> Iterator[str]:
    start = f"--sglang-config {args.sglang_config}"
    for model in topology.models:
        for problem in _groups(args, model):
            yield f"{start}: model {model.name}: {problem}"
    if args.debug_rollout_only:
        return
    if not any(model.updates_weights for model in topology.models):
        yield f"{start}: no model has update_weights: true, so no engine would receive the trained weights."


def _groups(args: Namespace, model: ModelSpec) -> Iterator[str]:
    kinds = {group.worker_type for group in model.groups}
    if WorkerType.ENCODER in kinds:
        reason = (
            "SGLang's encoder server cannot receive weights (it answers /update_weights_from_disk with 404), "
            "so images would be encoded with the first weights"
            if model.updates_weights
            else "slime does not start SGLang's encoder server. Start it before the run, and give the regular group "
            "overrides: {language_only: true, encoder_urls: [http://HOST:PORT]}"
        )
        yield f"worker_type encoder is not supported: {reason}. Use regular engines, which encode images themselves."
    if model.updates_weights and any(group.overrides.get("language_only") for group in model.groups):
        yield (
            "overrides: language_only: SGLang's encoder server cannot receive weights, so images would be encoded with "
            "the first weights. Leave it out, or set update_weights: false."
        )
    if model.has_pd and not {WorkerType.PREFILL, WorkerType.DECODE} <= kinds:
        yield "prefill engines need decode engines, and the other way round."
    if model.has_pd and WorkerType.REGULAR in kinds:
        yield "regular engines cannot share the router of prefill and decode engines: give them a model entry."
    groups = [group for group in model.groups if group.num_engines]
    sizes = {(group.num_gpus_per_engine, num_stages(args.sglang_pp_size, group.overrides)) for group in groups}
    for width in sorted({width for width, _ in sizes}):
        if width > args.num_gpus_per_node and width % args.num_gpus_per_node:
            yield f"num_gpus_per_engine {width} must be a multiple of --num-gpus-per-node {args.num_gpus_per_node}."
    for width, pp in sorted(sizes):
        if pp < 1 or width % pp:
            yield f"num_gpus_per_engine {width} must be a multiple of the pipeline stages, pp_size {pp}."
        elif pp > 1:
            yield from _stages(args, f"pp_size {pp}", is_updated=model.updates_weights)
    yield from adapter_of_model(args, model)


def _direct_requests(args: Namespace) -> Iterator[str]:
    """Refuse features that need data of a single engine if prefill and decode run on different engines."""
    asks = []
    if args.use_rollout_routing_replay:
        asks.append(("--use-rollout-routing-replay", "the expert choices"))
    if from_args(FieldFlags, args).cuts_vocabulary:
        flags = f"--rollout-top-p {args.rollout_top_p} --rollout-top-k {args.rollout_top_k}"
        asks.append((flags, "the ids that tokens were sampled from"))
    flag = _pd_flag(args) if asks else None
    if flag is None:
        return
    for ask, what in asks:
        yield (
            f"{ask} does not work with prefill and decode on different engines ({flag}): the router, which brings "
            f"those together, drops {what}. Use regular engines, or drop it."
        )


def _adapter_of_pd(args: Namespace) -> Iterator[str]:
    flag = _pd_flag(args) if from_args(FieldFlags, args).serves_adapter else None
    if flag is not None:
        yield (
            f"--lora-rank {args.lora_rank} does not work with prefill and decode on different engines ({flag}): no "
            "single engine can prove that it uses the adapter. Use regular engines, or add --lora-merge."
        )


def _pd_flag(args: Namespace) -> str | None:
    """The flag that puts prefill and decode of a trained model on different engines, or None."""
    if args.debug_train_only:
        return None
    if args.prefill_num_servers is not None:
        return f"--prefill-num-servers {args.prefill_num_servers}"
    infos = vars(args).get("rollout_external_engine_infos")
    if infos is not None and any(info.is_pd_worker for info in ExternalEngineInfo.of_all(infos)):
        return _EXTERNAL
    return next((text for model, text in _pd_models(args) if model.updates_weights), None)


def _pd_models(args: Namespace) -> Iterator[tuple[ModelSpec, str]]:
    """Models of the file with prefill and decode engines, and their names in messages. Empty for an invalid file."""
    if args.sglang_config is None:
        return
    try:
        models = topology_of(args).models
    except ConfigError:  # reported by the rule of the file
        return
    yield from (
        (model, f"--sglang-config {args.sglang_config}: model {model.name}") for model in models if model.has_pd
    )


def _on_cpu(args: Namespace) -> Iterator[str]:
    """Refuse prefill and decode engines on a CPU, which cannot transfer their cache there."""
    if args.debug_train_only or not accelerator.current().is_cpu:
        return
    flags = [text for _, text in _pd_models(args)]
    if args.prefill_num_servers is not None:
        flags.append(f"--prefill-num-servers {args.prefill_num_servers}")
    for flag in flags:
        yield (
            f"{flag}: prefill and decode on different engines need GPUs, and this machine has none: engines on a CPU "
            "cannot hand their cache to one another. Use regular engines here."
        )


def _external(args: Namespace) -> Iterator[str]:
    addrs = args.rollout_external_engine_addrs
    if addrs is None or args.debug_train_only:
        return
    for flag, is_on in (("--colocate", args.colocate), ("--offload-rollout", args.offload_rollout)):
        if is_on:
            yield f"{flag} does not work with {_EXTERNAL}: engines of others give no memory away. Drop one."
    if vars(args).get("rollout_external_engine_infos") is None:
        return  # a plan does not query engines
    infos = ExternalEngineInfo.of_all(args.rollout_external_engine_infos)
    for info in infos:
        yield from problems_of(info, args)
    kinds = {info.worker_type for info in infos}
    if kinds & {WorkerType.PREFILL, WorkerType.DECODE} and kinds != {WorkerType.PREFILL, WorkerType.DECODE}:
        yield f"{_EXTERNAL}: prefill engines need decode engines and no regular ones; these are {', '.join(kinds)}."
    away = [info.url for info in infos if not info.host.startswith(_LOOPBACK)]
    if away and not args.debug_rollout_only and not (os.environ.get("RAY_ADDRESS") or os.environ.get("SLIME_HOST_IP")):
        yield (
            f"{_EXTERNAL} {away[0]} is on another host, which cannot reach a trainer on loopback: set SLIME_HOST_IP to "
            "this host's address and GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to its network device."
        )


def _shared_with_source(args: Namespace) -> Iterator[str]:
    """Refuse an engine that shares a GPU with trainer rank 0 and receives its weights over NCCL."""
    # Rank 0 sends the weights, and NCCL refuses two members of a group on one GPU.
    if not args.colocate or args.update_weight_transport != "nccl" or accelerator.current().is_cpu:
        return
    if args.debug_train_only or args.debug_rollout_only:
        return
    try:
        topology = topology_of(args)
    except ConfigError:  # reported by the rule of the file
        return
    trained = {model.name for model in topology.models if model.updates_weights}
    for name, places in topology.places(args.hf_checkpoint).items():
        for place in places:
            if name in trained and place.first_slot == 0 and place.num_gpus > args.world_size:
                yield (
                    f"--colocate: engine {place.rank} has {place.num_gpus} GPUs and the trainer only "
                    f"{args.world_size} of them, so they cannot exchange weights on the GPUs they share: make engines "
                    f"smaller ({_WIDTH}), or use --update-weight-transport disk."
                )


RULES: tuple[Rule, ...] = (
    _sizes,
    _router,
    _exclusions,
    _language_only,
    _prefill,
    _deployment,
    _external,
    _direct_requests,
    _adapter_of_pd,
    served_adapter,
)
MACHINE_RULES: tuple[Rule, ...] = (_on_cpu, drafts_on_cpu, _shared_with_source, experts_on_cpu)
