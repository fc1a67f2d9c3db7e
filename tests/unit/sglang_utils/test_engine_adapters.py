"""An adapter on its way to the ranks of an engine: one copy per host, or one in the request."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils import engine_adapters
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.engine_adapters import StagedAdapter
from slime.utils.errors import EngineError

VALUES = torch.arange(50_000, dtype=torch.float32)
BYTES = VALUES.numpy().tobytes()
METADATA = [SimpleNamespace(name="a", shape=VALUES.shape, dtype=VALUES.dtype, start_idx=0, end_idx=len(BYTES))]

# Each rank of an engine is a process that reads its text once.
RANK = """
import base64, pickle, sys
import torch, torch.multiprocessing
content = pickle.loads(base64.b64decode(sys.stdin.read()))
print(content["flattened_tensor"].view(torch.float32).sum(dtype=torch.float64).item(), content["metadata"][0].name)
del content  # as an engine that unloads the adapter
"""


def read_by_ranks(texts: Sequence[str]) -> list[str]:
    return [
        subprocess.run([sys.executable, "-c", RANK], input=text, capture_output=True, text=True, check=True).stdout
        for text in texts
    ]


def names_in_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}


def test_ranks_of_one_host_read_one_copy_in_turn_which_then_is_freed():
    before = names_in_shared_memory()
    adapter = StagedAdapter(BYTES, METADATA, is_shared=True)
    texts = adapter.texts(2)
    assert sum(map(len, texts)) < len(BYTES) / 10
    assert len(names_in_shared_memory() - before) == 1
    # the second one opens the memory when the first one has ended
    assert read_by_ranks(texts) == [f"{VALUES.sum(dtype=torch.float64).item()} a\n"] * 2
    del adapter
    assert names_in_shared_memory() <= before


@pytest.mark.parametrize("problem", ["it may be on another host", "too small", "torch fails"])
def test_ranks_that_see_no_shared_memory_get_all_bytes(
    problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(size: int) -> None:
        raise RuntimeError("no socket")

    is_shared = problem != "it may be on another host"
    free = len(BYTES) - 1 if problem == "too small" else 1 << 40
    monkeypatch.setattr(engine_adapters.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    if problem == "torch fails":
        monkeypatch.setattr(torch.UntypedStorage, "_new_using_filename_cpu", fail)
    before = names_in_shared_memory()
    texts = StagedAdapter(BYTES, METADATA, is_shared=is_shared).texts(2)
    assert len(texts[0]) > len(BYTES)
    assert texts[0] == texts[1]
    assert names_in_shared_memory() <= before
    assert ("/dev/shm cannot hold an adapter of 200000 bytes" in caplog.text) is is_shared
    content = pickle.loads(base64.b64decode(texts[0]))
    assert torch.equal(content["flattened_tensor"].view(torch.float32), VALUES)


class Node:
    """The part of an engine on another node."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stage_adapter(self, tensors: bytes, metadata: Sequence[Any], num_ranks: int, timeout_s: float) -> list[str]:
        assert (tensors, len(metadata), timeout_s) == (BYTES, 1, 99.0)
        return [f"{self.name} {rank}" for rank in range(num_ranks)]


def make_engine(tmp_path: Path, nodes: Sequence[Any] = ()) -> tuple[SGLangEngine, list[tuple[str, Any]]]:
    engine = SGLangEngine(EngineSpec(0, "127.0.0.1", 1, [], {}, tmp_path / "log"), nodes)
    calls: list[tuple[str, Any]] = []

    def change(verb: str, body: Any, timeout_s: Any = None, **_: Any) -> dict[str, Any]:
        calls.append((verb, body))
        return {}

    engine._change = change  # type: ignore[method-assign]
    return engine, calls


def test_every_node_of_an_engine_keeps_a_copy_for_its_ranks(tmp_path: Path):
    engine, calls = make_engine(tmp_path, [Node("second"), Node("third")])
    engine.stage_adapter(BYTES, METADATA, num_ranks=6, timeout_s=99.0)
    assert calls == []  # the engine still generates
    engine.load_staged_adapter("policy", {"r": 8}, {"a": "sum"}, "3")
    assert [verb for verb, _ in calls] == [
        *("unload_lora_adapter", "load_lora_adapter_from_tensors", "update_weight_version")
    ]
    texts = calls[1][1]["serialized_named_tensors"]
    assert texts[2:] == ["second 0", "second 1", "third 0", "third 1"]
    assert all(f"torch_{os.getpid()}_".encode() in base64.b64decode(text) for text in texts[:2])
    assert calls[2][1]["new_version"] == "3"


def test_a_staged_adapter_is_loaded_once(tmp_path: Path):
    engine, calls = make_engine(tmp_path)
    engine.stage_adapter(BYTES, METADATA, num_ranks=1, timeout_s=99.0)
    engine.load_staged_adapter("policy", {}, {}, "3")
    with pytest.raises(EngineError, match="no adapter is staged"):
        engine.load_staged_adapter("policy", {}, {}, "4")
    assert len(calls) == 3
