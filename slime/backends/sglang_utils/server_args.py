"""The command line of one SGLang server: flags computed by slime, then the user's ``--sglang-*`` flags.

Does not import SGLang: the server process parses and resolves its own arguments.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.backends.sglang_utils.feature_rules import adapter_flags, draft_flags, serves_adapter, words_of
from slime.backends.sglang_utils.option_table import server_options
from slime.backends.sglang_utils.topology import WorkerType, override_argv
from slime.utils import accelerator
from slime.utils.net import WEIGHT_INTERFACES

# On a CPU SGLang would derive sizes from the memory of the host, which all engines and the trainer share.
_CPU_DEFAULTS = {
    "--max-total-tokens": "65536",
    "--max-running-requests": "256",
    "--mem-fraction-static": "0.3",
}
_PREFILL_GRAPH = {"--cuda-graph-backend-prefill", "--disable-prefill-cuda-graph", "--cuda-graph-config"}
# Switches that a decode engine does not support.
_PREFILL_ONLY = {"--enable-hierarchical-cache", "--enable-hicache"}
_CPU_SLOTS = 64
# Limits of glibc's malloc in an engine: smaller blocks come from the heap, and so much free memory stays in it.
_KEPT_BYTES = str(1 << 30)
# Flags of engines that release memory to the trainer.
_MEMORY_SAVER: dict[str, Any] = {"--enable-memory-saver": None, "--enable-draft-weights-cpu-backup": None}

_CPU_MODELS = "slime.backends.sglang_utils.cpu_platform.models"


def build_argv(
    args: Namespace,
    *,
    rank: int,
    host: str,
    port: int,
    nccl_port: int,
    base_gpu_id: int,
    tp_size: int,
    dist_init_addr: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    worker_type: WorkerType = WorkerType.REGULAR,
    bootstrap_port: int | None = None,
    num_nodes: int = 1,
    node_rank: int = 0,
) -> list[str]:
    """Arguments of ``sglang.launch_server`` for engine number ``rank``.

    Computed flags come first, then the user's ``--sglang-*`` flags, which cannot repeat computed ones, then the
    ``overrides`` of the engine's group, which override both.

    Args:
        tp_size: tensor-parallel size, on all nodes.
        dist_init_addr: rendezvous address of its processes, on its first node.
        bootstrap_port: port on which decode engines request a prefill engine's cache.
        num_nodes: nodes of the engine.
        node_rank: number of this node within the engine. Only node 0 answers requests.
    """
    unsupported = _PREFILL_ONLY if worker_type is WorkerType.DECODE else ()
    user = [word for word in args.sglang_argv if word not in unsupported]
    given = {token.split("=")[0] for token in user if token.startswith("--")}
    flags: dict[str, Any] = {
        "--model-path": args.hf_checkpoint,
        "--host": host,
        "--port": port,
        "--nccl-port": nccl_port,
        "--tp-size": tp_size,
        # differs between engines: with equal seeds they could sample equal responses
        "--random-seed": args.seed + rank * args.num_gpus_per_node,
        "--trust-remote-code": None,
        "--skip-server-warmup": None,
    }
    if dist_init_addr is not None:
        flags["--dist-init-addr"] = dist_init_addr
    if num_nodes > 1:
        flags |= {"--nnodes": num_nodes, "--node-rank": node_rank}
    if "--dtype" not in given and "model_path" not in (overrides or {}):  # another model keeps its precision
        flags["--dtype"] = args.sglang_dtype
    if "--log-level" not in given:
        flags["--log-level"] = "warning"
    if args.use_rollout_routing_replay:
        flags["--enable-return-routed-experts"] = None
    is_adapted = serves_adapter(args) and (overrides or {}).get("model_path") in (None, args.hf_checkpoint)
    if is_adapted:
        flags |= {name: value for name, value in adapter_flags(args).items() if name not in given}
    off = _turned_off(overrides or {})
    releases_memory = args.offload_rollout and "--enable-memory-saver" not in off
    if releases_memory:
        flags |= _MEMORY_SAVER
        # not all weights are sent again
        if args.update_weights_interval != 1 or args.update_weight_changed_only or is_adapted:
            flags["--enable-weights-cpu-backup"] = None
    flags |= _pd(worker_type, bootstrap_port)
    if accelerator.current().is_cpu:
        flags |= {"--device": "cpu", "--sleep-on-idle": None}
        flags |= {name: value for name, value in (_CPU_DEFAULTS | draft_flags(user)).items() if name not in given}
    else:
        flags |= {"--base-gpu-id": base_gpu_id, "--enable-metrics": None}
        if releases_memory and not given & _PREFILL_GRAPH:
            flags["--cuda-graph-backend-prefill"] = "disabled"  # its memory cannot be released
    own = [part for name, value in flags.items() for part in (name, *words_of(value))]
    return [word for word in own + user if word not in off] + override_argv(overrides or {})


def _pd(worker_type: WorkerType, bootstrap_port: int | None) -> dict[str, Any]:
    """Flags for prefill and decode on different engines."""
    match worker_type:
        case WorkerType.PREFILL:
            assert bootstrap_port is not None, "a prefill engine has a bootstrap port"
            flags: dict[str, Any] = {"--disaggregation-mode": "prefill"}
            # the router picks the copy of the model through the room number that it gives a request
            flags |= {"--load-balance-method": "follow_bootstrap_room"}
            return flags | {"--disaggregation-bootstrap-port": bootstrap_port}
        case WorkerType.DECODE:
            return {"--disaggregation-mode": "decode"}
        case WorkerType.REGULAR:
            return {}
        case _:
            raise AssertionError(f"{worker_type} engines are not started")


def _turned_off(overrides: Mapping[str, Any]) -> set[str]:
    """Switches that an override turns off."""
    # They have no negative form on the command line, so their positive form must be left out.
    options = server_options().by_flag.items()
    return {flag for flag, option in options if option.kind == "switch" and overrides.get(option.dest) is False}


def server_env(host: str | None = None) -> dict[str, str]:
    """Environment of an engine process, on top of the actor's.

    Args:
        host: address of this node for parts of the engine on other nodes.
    """
    env = {
        "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
        "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
        "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
        "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
        # SGLang keeps the embeddings of pictures when the weights of the vision tower change
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
    }
    if host is not None:
        env["SGLANG_HOST_IP"] = host  # otherwise SGLang guesses it
    env = {name: os.environ.get(name, value) for name, value in env.items()}
    if accelerator.current().is_cpu:
        env |= {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # SGLang compiles functions of a few operators, such as the sampling with seeds: up to 10 s per process
            "TORCHDYNAMO_DISABLE": "1",
            # one entry per possible device slot: SGLang indexes the list by slot and binds nothing on this device
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(_CPU_SLOTS))),
            "SGLANG_EXTERNAL_MODEL_PACKAGE": os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE", _CPU_MODELS),
            # memory of a bucket of weights stays for the next one: fresh pages take longer than receiving and loading
            "MALLOC_MMAP_THRESHOLD_": os.environ.get("MALLOC_MMAP_THRESHOLD_", _KEPT_BYTES),
            "MALLOC_TRIM_THRESHOLD_": os.environ.get("MALLOC_TRIM_THRESHOLD_", _KEPT_BYTES),
        }
        if WEIGHT_INTERFACES in os.environ:
            env["GLOO_SOCKET_IFNAME"] = os.environ[WEIGHT_INTERFACES]
    return env
