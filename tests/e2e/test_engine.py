"""One real SGLang server: the log-probabilities it reports, and the weights it is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from slime.backends.protocols import EngineInfo
from slime.backends.sglang_utils.checksum import expected_checksums
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.utils.errors import EngineError
from slime.utils.net import free_port
from slime.weight_sync.send_distributed import DistributedSender
from slime.weight_sync.session import WeightUpdate, push_weights


class LocalCalls:
    def __init__(self, futures: list[Future]) -> None:
        self.futures = futures

    def wait(self, timeout_s: float) -> list[Any]:
        return [future.result(timeout_s) for future in self.futures]


class LocalFleet:
    """Engines of this process behind the EngineFleet protocol: the weight sync needs no Ray."""

    def __init__(self, handles: Sequence[SGLangEngine]) -> None:
        self.handles = handles
        self.engines = [EngineInfo(handle.url, 1) for handle in handles]
        self.pool = ThreadPoolExecutor(4)

    def start(self, verb: str, each: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> LocalCalls:
        own = each or [{}] * len(self.handles)
        calls = [
            self.pool.submit(getattr(handle, verb), **kwargs, **extra)
            for handle, extra in zip(self.handles, own, strict=True)
        ]
        return LocalCalls(calls)


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("fork") / "log", server_env())
    yield server
    server.stop()


def make_engine(task: Any, fork_server: ForkServer, log: Path, *user_flags: str) -> SGLangEngine:
    from argparse import Namespace

    flags = ["--context-length", "128", "--max-total-tokens", "8192", *user_flags]
    args = Namespace(hf_checkpoint=task.model, sglang_argv=flags, seed=1, num_gpus_per_node=8, fp32=True, fp16=False)
    port = free_port()
    argv = build_argv(args, rank=0, host="127.0.0.1", port=port, nccl_port=free_port(), base_gpu_id=0, tp_size=1)
    socket = fork_server.socket_path
    return SGLangEngine(
        EngineSpec(0, "127.0.0.1", port, argv, server_env(), log, start_timeout_s=120, fork_server_socket=socket)
    )


@pytest.fixture(scope="module")
def engine(tiny_task, fork_server, tmp_path_factory):
    engine = make_engine(tiny_task, fork_server, tmp_path_factory.mktemp("engine") / "log")
    engine.start()
    yield engine
    engine.stop()


def model_of(task: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)


def generate(engine: SGLangEngine, ids: list[int]) -> tuple[list[int], list[float], str]:
    parameters = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True}
    response = httpx.post(f"{engine.url}/generate", json=body, timeout=60).raise_for_status().json()
    pairs = response["meta_info"]["output_token_logprobs"]
    return [pair[1] for pair in pairs], [pair[0] for pair in pairs], response["meta_info"]["weight_version"]


@torch.no_grad()
def worst_difference(model: Any, ids: list[int], output: list[int], log_probs: list[float]) -> float:
    logits = model(torch.tensor([ids + output])).logits[0].log_softmax(-1)
    expected = logits[len(ids) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]
    return (expected - torch.tensor(log_probs)).abs().max().item()


def test_reported_log_probabilities_are_those_of_transformers(engine, tiny_task):
    ids = [5, 6, 7, 8]
    output, log_probs, _ = generate(engine, ids)
    assert len(output) == 16
    assert worst_difference(model_of(tiny_task), ids, output, log_probs) < 1e-5


def test_a_weight_sync_changes_every_tensor_and_stamps_the_version(engine, tiny_task):
    model = model_of(tiny_task)
    engine.reset_weights()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    weights = [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
    fleet = LocalFleet([engine])
    sender = DistributedSender(fleet, group_name="test", timeout_s=60)
    sender.connect("127.0.0.1", free_port())
    try:
        update = WeightUpdate("41", max_chunk_bytes=1 << 20, timeout_s=60, checksums=expected_checksums)
        num_bytes = push_weights(fleet, sender, weights, update)
    finally:
        sender.disconnect()
    assert num_bytes == sum(tensor.numel() * 4 for _, tensor in weights)
    assert set(expected_checksums(weights)) == set(engine.weights_checksum())
    output, log_probs, version = generate(engine, [9, 10, 11])
    assert version == "41"
    assert worst_difference(model, [9, 10, 11], output, log_probs) < 1e-5


def test_a_refused_call_names_engine_verb_and_answer(engine):
    with pytest.raises(EngineError, match=r"engine 0 .* refused end_weight_update: status 400"):
        engine.end_weight_update()


def test_a_server_that_cannot_start_shows_its_last_log_lines(tiny_task, fork_server, tmp_path):
    broken = make_engine(tiny_task, fork_server, tmp_path / "log", "--attention-backend", "no_such_backend")
    with pytest.raises(EngineError, match=r"(?s)engine 0 .* died .*no_such_backend"):
        broken.start()
