"""The command line of one SGLang server: what slime computes, then what the user said with ``--sglang-*``.

Does not import SGLang: the server process parses and resolves its own arguments.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.utils import accelerator

__all__ = ["build_argv", "check_user_flags", "known_flags", "server_env"]

_CONTROLLED_BY = {
    "--model-path": "--hf-checkpoint",
    "--model": "--hf-checkpoint",
    "--tp-size": "--rollout-num-gpus-per-engine",
    "--tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "--random-seed": "--seed",
    "--port": "nothing: slime chooses free ports",
    "--nccl-port": "nothing: slime chooses free ports",
    "--host": "nothing: engines bind to the address of their node",
    "--dist-init-addr": "nothing: slime chooses it",
    "--nccl-init-addr": "nothing: slime chooses it",
    "--config": "nothing: a file could set any of these flags",
    "--enable-memory-saver": "nothing: slime sets it when it needs it",
    "--enable-return-routed-experts": "nothing: slime sets it when it needs it",
    "--nnodes": "nothing: slime computes it",
    "--node-rank": "nothing: slime computes it",
    "--base-gpu-id": "nothing: slime places engines",
    "--gpu-id-step": "nothing: slime places engines",
    "--skip-server-warmup": "nothing: always set",
    "--trust-remote-code": "nothing: always set",
}
"""SGLang flag that slime computes -> the slime flag that decides it."""

_CPU_DEFAULTS = {
    "--max-total-tokens": "65536",
    "--max-running-requests": "256",
    "--mem-fraction-static": "0.3",
}
_CPU_SLOTS = 64
_CPU_MODELS = "slime.backends.sglang_utils.cpu_platform.models"


def build_argv(
    args: Namespace, *, rank: int, host: str, port: int, nccl_port: int, base_gpu_id: int, tp_size: int
) -> list[str]:
    """Arguments of ``sglang.launch_server`` for engine number ``rank``."""
    user = list(args.sglang_argv)
    given = {token.split("=")[0] for token in user if token.startswith("--")}
    flags: dict[str, Any] = {
        "--model-path": args.hf_checkpoint,
        "--host": host,
        "--port": port,
        "--nccl-port": nccl_port,
        "--tp-size": tp_size,
        "--random-seed": args.seed + rank * args.num_gpus_per_node,
        "--trust-remote-code": None,
        "--skip-server-warmup": None,
    }
    if "--dtype" not in given and (args.fp32 or args.fp16):
        flags["--dtype"] = "float32" if args.fp32 else "float16"
    if "--log-level" not in given:
        flags["--log-level"] = "warning"
    if accelerator.current().is_cpu:
        flags |= {"--device": "cpu", "--sleep-on-idle": None}
        flags |= {name: value for name, value in _CPU_DEFAULTS.items() if name not in given}
    else:
        flags["--base-gpu-id"] = base_gpu_id
    own = [part for name, value in flags.items() for part in ([name] if value is None else [name, str(value)])]
    return own + user


def server_env() -> dict[str, str]:
    """Environment of an engine process, on top of the actor's."""
    env = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
        "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    }
    env = {name: os.environ.get(name, value) for name, value in env.items()}
    if accelerator.current().is_cpu:
        env |= {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # one entry per possible device slot: SGLang indexes the list by slot and binds nothing on this device
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(_CPU_SLOTS))),
            "SGLANG_EXTERNAL_MODEL_PACKAGE": os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE", _CPU_MODELS),
        }
    return env


def check_user_flags(args: Namespace) -> Iterator[str]:
    """One problem per ``--sglang-*`` flag whose value slime computes."""
    for token in args.sglang_argv:
        flag = token.split("=")[0]
        if flag in _CONTROLLED_BY:
            yield f"--sglang-{flag[2:]} cannot be set: it follows from {_CONTROLLED_BY[flag]}."


@functools.cache
def known_flags() -> frozenset[str]:
    """Option strings of the installed SGLang server, read from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    root = Path(spec.submodule_search_locations[0]) / "srt"
    flags: set[str] = set()
    for file in (root / "server_args.py", *(root / "arg_groups" / "fields").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        flags.update(re.findall(r"[\"'](--[a-z][a-z0-9-]+)[\"']", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                flags.add("--" + node.target.id.replace("_", "-"))
    return frozenset(flags)
