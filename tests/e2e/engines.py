"""Engines without Ray: real servers in this process, with the protocol that weight sync uses."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.backends import Place
from slime.backends.sglang_utils.checksum import SGLangTensors
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.doctor.engine_verbs import LocalCalls, LocalFleet
from slime.models.hf_shape import read_shape
from slime.utils.net import claim_ports
from slime.weight_sync.local_checkpoint import pull
from slime.weight_sync.root_hash import RootProof


def proof_of(model: str) -> RootProof:
    """The comparison of an engine's tensors, of which every one must be as expected."""
    return RootProof(SGLangTensors.of(read_shape(model)), excuses="none")


def assert_all_compared(engine: SGLangEngine, proof: RootProof, blocks: int = 1) -> None:
    """The proof of the last sync has compared every tensor of every rank."""
    ranks = engine.rank_checksums()
    for number, held in ranks:
        weights = {name for name in held if ".rotary_emb." not in name}  # a table of positions has no weights
        assert weights == proof.compared(Place(number, len(ranks), blocks))


def shared_files() -> set[Path]:
    """Files in shared memory of this process, which sends."""
    return set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


class HostFleet(LocalFleet):
    """With the helper on the engines' host that follows the versions of their weights."""

    def start(self, verb: str, each: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> LocalCalls:
        if verb != "pull_weights":
            return super().start(verb, each, **kwargs)
        root, local = Path(kwargs["source_dir"]), Path(kwargs["local_dir"])
        return LocalCalls([self.pool.submit(pull, root, local, kwargs["version"])])


def make_engine(
    task: Any,
    fork_server: ForkServer,
    log: Path,
    *user_flags: str,
    port: int | None = None,
    tp_size: int = 1,
    env: Mapping[str, str] | None = None,
) -> SGLangEngine:
    flags = ["--context-length", "128", "--max-total-tokens", "8192", *user_flags]
    args = Namespace(hf_checkpoint=task.model, sglang_argv=flags, seed=1, num_gpus_per_node=8, sglang_dtype="float32")
    vars(args).update(offload_rollout=False, use_rollout_routing_replay=False)
    host, claims = "127.0.0.1", [claim_ports("127.0.0.1") for _ in range(2)]
    port, nccl_port = port or claims[0].first, claims[1].first
    argv = build_argv(args, rank=0, host=host, port=port, nccl_port=nccl_port, base_gpu_id=0, tp_size=tp_size)
    path = fork_server.socket_path
    spec = EngineSpec(
        0, host, port, argv, {**server_env(), **(env or {})}, log, start_timeout_s=600, fork_server_socket=path
    )
    engine = SGLangEngine(spec)
    engine.claims = claims  # as long as the engine: it binds them seconds from now
    return engine
