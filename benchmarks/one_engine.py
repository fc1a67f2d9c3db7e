"""One real SGLang server on the demo's model, for benchmarks."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.utils import accelerator
from slime.utils.net import free_port


@contextmanager
def one_engine(root: Path, model: str, *flags: str) -> Iterator[SGLangEngine]:
    """A server that answers, started by slime's own launcher. Its logs go to ``root``.

    Args:
        flags: of SGLang.
    """
    args = Namespace(
        hf_checkpoint=model,
        sglang_argv=["--context-length", "256", *flags],
        seed=1,
        num_gpus_per_node=8,
        sglang_dtype="float32",
        offload_rollout=False,
        use_rollout_routing_replay=False,
    )
    port = free_port()
    argv = build_argv(args, rank=0, host="127.0.0.1", port=port, nccl_port=free_port(), base_gpu_id=0, tp_size=1)
    preloaded = ForkServer(root / "fork_server.log", server_env()) if accelerator.current().is_cpu else None
    socket = None if preloaded is None else preloaded.socket_path
    spec = EngineSpec(0, "127.0.0.1", port, argv, server_env(), root / "engine.log", fork_server_socket=socket)
    engine = SGLangEngine(spec)
    started = time.perf_counter()
    try:
        engine.start()
        print(f"engine ready after {time.perf_counter() - started:.1f} s", flush=True)
        yield engine
    finally:
        # The engine first: it is a child of the preloading process.
        engine.stop()
        if preloaded is not None:
            preloaded.stop()
