"""Weights in a GPU's memory, as SGLang opens them: torch's handle is played, everything around it is real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from slime.weight_sync import send_tensor
from slime.weight_sync.chunks import WeightChunk


def serialized(flat: torch.Tensor, chunk: WeightChunk) -> str:
    """The payload of one rank."""
    return send_tensor.payloads(chunk, [send_tensor.handle_of(flat)])[0]


def played_handle(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The result of torch's ``reduce_tensor`` for memory of device 1."""
    handle = (b"memory", tensor.nbytes, 0, False, b"counter", 0, b"event", True)
    like = (torch.Tensor, tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage, tensor.dtype)
    return reductions.rebuild_cuda_tensor, (*like, 1, *handle)


def test_an_engine_that_counts_devices_differently_opens_the_memory_on_the_right_one(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.utils import patch_torch
    from sglang.srt.utils.common import MultiprocessingSerializer

    chunk = WeightChunk([("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))])
    flat = chunk.flatten()
    with monkeypatch.context() as trainer:
        trainer.setattr(reductions, "reduce_tensor", played_handle)
        trainer.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))
        text = serialized(flat, chunk)
    opened_with: list[Any] = []

    def rebuild(*arguments: Any) -> torch.Tensor:
        opened_with.extend(arguments)
        return flat

    # what SGLang does to torch in an engine's process, which sees the trainer's device 1 as its device 2
    monkeypatch.setattr(reductions, "_rebuild_cuda_tensor_original", rebuild, raising=False)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", patch_torch._rebuild_cuda_tensor_modified)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{3 - device}"))
    opened = MultiprocessingSerializer.deserialize(text)
    assert opened_with[patch_torch._REDUCE_TENSOR_ARG_DEVICE_INDEX] == 2
    assert opened_with[7:] == list(played_handle(flat)[1][7:])
    for meta, (name, tensor) in zip(opened["metadata"], chunk.tensors, strict=True):
        part = opened["flattened_tensor"][meta.start_idx : meta.end_idx]
        assert meta.name == name
        assert torch.equal(part.view(meta.dtype).reshape(meta.shape), tensor)
