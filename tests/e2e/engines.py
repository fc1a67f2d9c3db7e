"""Engines without Ray: real servers in this process, with the protocol that weight sync uses."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slime.backends.protocols import EngineInfo
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.utils.net import claim_ports
from slime.weight_sync.local_checkpoint import pull


class LocalCalls:
    def __init__(self, futures: list[Future]) -> None:
        self.futures = futures

    def wait(self, timeout_s: float) -> list[Any]:
        return [future.result(timeout_s) for future in self.futures]


class LocalFleet:
    """Engines of this process with the EngineFleet protocol: the weight sync needs no Ray."""

    def __init__(self, handles: Sequence[SGLangEngine], engines: Sequence[EngineInfo] | None = None) -> None:
        self.handles = handles
        self.engines = engines or [EngineInfo(handle.url, 1) for handle in handles]
        self.pool = ThreadPoolExecutor(4)

    def only(self, indices: Sequence[int]) -> LocalFleet:
        return LocalFleet([self.handles[i] for i in indices], [self.engines[i] for i in indices])

    def start(self, verb: str, each: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> LocalCalls:
        own = each or [{}] * len(self.handles)
        calls = [
            self.pool.submit(getattr(handle, verb), **kwargs, **extra)
            for handle, extra in zip(self.handles, own, strict=True)
        ]
        return LocalCalls(calls)


class HostFleet(LocalFleet):
    """With the helper on the engines' host that follows the versions of their weights."""

    def start(self, verb: str, each: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> LocalCalls:
        if verb != "pull_weights":
            return super().start(verb, each, **kwargs)
        root, local = Path(kwargs["source_dir"]), Path(kwargs["local_dir"])
        return LocalCalls([self.pool.submit(pull, root, local, kwargs["version"])])


def make_engine(
    task: Any, fork_server: ForkServer, log: Path, *user_flags: str, port: int | None = None, tp_size: int = 1
) -> SGLangEngine:
    flags = ["--context-length", "128", "--max-total-tokens", "8192", *user_flags]
    args = Namespace(hf_checkpoint=task.model, sglang_argv=flags, seed=1, num_gpus_per_node=8, sglang_dtype="float32")
    vars(args).update(offload_rollout=False, use_rollout_routing_replay=False)
    host, claims = "127.0.0.1", [claim_ports("127.0.0.1") for _ in range(2)]
    port, nccl_port = port or claims[0].first, claims[1].first
    argv = build_argv(args, rank=0, host=host, port=port, nccl_port=nccl_port, base_gpu_id=0, tp_size=tp_size)
    path = fork_server.socket_path
    spec = EngineSpec(0, host, port, argv, server_env(), log, start_timeout_s=600, fork_server_socket=path)
    engine = SGLangEngine(spec)
    engine.claims = claims  # as long as the engine: it binds them seconds from now
    return engine
