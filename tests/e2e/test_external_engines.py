"""Engines that another program started: used, given weights, waited for, and left running."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import pytest

from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.external import ExternalEngine, discover_external_engines
from slime.backends.sglang_utils.feature_rules import adapter_words
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import server_env
from slime.backends.training.arguments import LoraArgs
from slime.data.engine_fields import ADAPTER_NAME
from slime.utils.errors import EngineError
from slime.utils.net import free_port
from tests.doc_commands import shown_flags
from tests.e2e.running import PLUGINS, metrics, values
from tests.e2e.watching import is_generating, read, running

ROLLOUTS = 3


def started(task: Any, fork_server: ForkServer, log: Path, port: int, *words: str) -> SGLangEngine:
    """A server as its owner starts it: ``python -m sglang.launch_server`` with these flags, without the import."""
    shown = shown_flags("docs/engines.md", "launch_server --model-path MODEL --host")
    more = f"--model-path {task.model} --port {port} --max-total-tokens 8192 --max-running-requests 64"
    argv = [*shown, *more.split(), "--log-level", "warning", *words]
    engine = SGLangEngine(
        EngineSpec(0, "127.0.0.1", port, argv, server_env(), log, 600, fork_server_socket=fork_server.socket_path)
    )
    engine.start()
    return engine


def run_flags(task: Any, directory: Path) -> list[Any]:
    return [
        *("--hf-checkpoint", task.model, "--prompt-data", task.train, "--label-key", "label"),
        *("--apply-chat-template", "--rollout-batch-size", 8, "--n-samples-per-prompt", 4, "--num-rollout", ROLLOUTS),
        *("--rollout-max-response-len", 100, "--custom-rm-path", f"{PLUGINS}:share_of_sevens", "--fp32"),
        *("--custom-generate-function-path", f"{PLUGINS}:generate_while_held"),
        *("--actor-num-gpus-per-node", 1, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--lr", "1e-3"),
        *("--check-weight-update-equal", "--output-dir", directory, "--experiment-name", "run"),
    ]


def test_engines_of_others_take_weights_are_waited_for_when_they_die_and_outlive_the_run(
    tiny_task, fork_server, tmp_path
):
    ports = [free_port(), free_port()]
    first, second = (started(tiny_task, fork_server, tmp_path / f"{port}.log", port) for port in ports)
    flags = [
        *run_flags(tiny_task, tmp_path),
        *shown_flags("docs/engines.md", "--rollout-external-engine-addrs"),
        *("--rollout-external-engine-addrs", *(f"127.0.0.1:{port}" for port in ports)),
        "--use-fault-tolerance",
    ]
    hold = tmp_path / "hold"
    hold.write_text("1")  # the second rollout goes on until the engine is back
    try:
        (info, _) = discover_external_engines([first.url, second.url])
        seen = ExternalEngine(0, info, 60.0)
        seen.start()
        with running(flags, tmp_path) as run:
            _, *urls = run.urls()
            assert urls == [first.url, second.url]
            run.wait(lambda: run.num_trained() >= 1 and is_generating(second.url))
            second.stop()
            run.wait(lambda: "engine 1: its process ended" in run.text())
            second = started(tiny_task, fork_server, tmp_path / "again.log", ports[1])
            run.wait(lambda: "engine 1 serves again" in run.text())
            hold.unlink()
            finished = run.end()
        assert finished.status == 0, finished.output[-6000:]
        assert max(values(metrics(tmp_path / "run"), "train/train_rollout_logprob_abs_diff")) < 1e-4
        assert finished.survivors() == []
        assert [engine.weight_version() for engine in (first, second)] == [str(ROLLOUTS)] * 2
        assert first.rank_checksums() == second.rank_checksums()
        seen.raise_if_dead()
        first.stop()
        with pytest.raises(EngineError, match=r"external engine 0 .*nobody listens there any more"):
            seen.raise_if_dead()
    finally:
        first.stop()
        second.stop()


def test_a_router_without_engines_gets_them_later_and_they_serve_an_adapter(tiny_task, fork_server, tmp_path):
    router_port, port = free_port(), free_port()
    router = f"http://127.0.0.1:{router_port}"
    lora = Namespace(**vars(LoraArgs(lora_rank=8)), hf_checkpoint=tiny_task.model)
    flags = [*run_flags(tiny_task, tmp_path), "--rollout-num-gpus", 0, "--sglang-router-port", router_port]
    flags += ["--lora-rank", lora.lora_rank]
    engine = None
    try:
        with running(flags, tmp_path) as run:
            run.wait(lambda: f"curl {router}/workers" in run.text())
            assert read(f"{router}/workers")["workers"] == []
            engine = started(tiny_task, fork_server, tmp_path / "engine.log", port, *adapter_words(lora))
            httpx.post(f"{router}/workers", json={"url": engine.url}).raise_for_status()
            finished = run.end()
        assert finished.status == 0, finished.output[-6000:]
        records = metrics(tmp_path / "run")
        assert max(values(records, "train/train_rollout_logprob_abs_diff")) < 1e-4
        base = sum(file.stat().st_size for file in Path(tiny_task.model).glob("*.safetensors"))
        assert max(values(records, "perf/update_weights_bytes")) < 0.2 * base, (
            "the base travels before the first rollout"
        )
        assert engine.weight_version() == str(ROLLOUTS)
        assert engine.adapters() == [ADAPTER_NAME]
    finally:
        if engine is not None:
            engine.stop()
