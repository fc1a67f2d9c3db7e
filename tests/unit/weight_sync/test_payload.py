"""The message to an engine on the same host: a handle to memory, in names that stock SGLang accepts."""

from __future__ import annotations

import base64
import pickle
import pickletools
import types
from pathlib import Path

import pytest
import torch

from slime.utils.errors import EngineError
from slime.weight_sync import send_tensor
from slime.weight_sync.chunks import WeightChunk


def serialized(flat: torch.Tensor, chunk: WeightChunk) -> str:
    """The payload of one rank."""
    return send_tensor.payloads(chunk, [send_tensor.handle_of(flat)])[0]


ALLOWED = {
    "torch.multiprocessing.reductions rebuild_tensor",
    "torch.multiprocessing.reductions rebuild_typed_storage",
    "torch.multiprocessing.reductions rebuild_storage_filename",
    "torch.storage UntypedStorage",
    "torch Tensor",
    "torch Size",
    "torch uint8",
    "torch float32",
    "torch bfloat16",
    "types SimpleNamespace",
}
"""Names from SGLang's list, which refuses all others."""


def _chunk(count: int = 50) -> WeightChunk:
    return WeightChunk([("a", torch.randn(3, count)), ("b", torch.randn(7)), ("c", torch.tensor(3.0))])


def _names(data: bytes) -> set[str]:
    """Globals of a pickle of protocol 3."""
    return {argument for code, argument, _ in pickletools.genops(data) if code.name == "GLOBAL"}


def test_the_other_side_finds_every_tensor_by_its_metadata_without_a_copy():
    chunk = _chunk()
    flat = send_tensor.shareable(chunk)
    opened = pickle.loads(base64.b64decode(serialized(flat, chunk)))
    for meta, (name, tensor) in zip(opened["metadata"], chunk.tensors, strict=True):
        part = opened["flattened_tensor"][meta.start_idx : meta.end_idx]
        assert meta.name == name
        assert meta.numel == tensor.nbytes
        assert torch.equal(part.view(meta.dtype).reshape(meta.shape), tensor)
    flat[0] += 1
    assert opened["flattened_tensor"][0] == flat[0]


def test_a_payload_has_the_size_of_a_handle():
    chunk = _chunk(count=100_000)
    assert len(serialized(send_tensor.shareable(chunk), chunk)) < 4000


def test_only_names_that_sglang_lets_in_are_in_a_payload():
    chunk = WeightChunk([("a", torch.zeros(3, dtype=torch.bfloat16))])
    names = _names(base64.b64decode(serialized(send_tensor.shareable(chunk), chunk)))
    assert "types SimpleNamespace" in names
    assert names <= ALLOWED


def test_one_list_of_names_serves_the_handles_of_all_ranks_which_travel_as_a_few_hundred_bytes():
    chunk = WeightChunk([(f"layers.{index}.weight", torch.randn(3, 4)) for index in range(300)])
    flats = [send_tensor.shareable(chunk) for _ in range(3)]
    # through another pickle, as on their way to the speaker
    handles = [pickle.dumps(send_tensor.handle_of(flat)) for flat in flats]
    assert max(map(len, handles)) < 1000
    texts = send_tensor.payloads(chunk, list(map(pickle.loads, handles)))
    for number, (flat, text) in enumerate(zip(flats, texts, strict=True)):
        assert text == serialized(flat, chunk)
        flat.fill_(number)
        opened = pickle.loads(base64.b64decode(text))
        assert opened["flattened_tensor"].unique().tolist() == [number]
        assert [(meta.name, meta.shape) for meta in opened["metadata"]] == [
            (name, tensor.shape) for name, tensor in chunk.tensors
        ]


def test_memory_is_given_back_with_the_last_reference():
    def files() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("torch_*")}

    before, chunk = files(), _chunk()
    flat = send_tensor.shareable(chunk)
    opened = pickle.loads(base64.b64decode(serialized(flat, chunk)))
    assert len(files() - before) == 1
    del flat, opened
    assert files() - before == set()


def test_too_little_shared_memory_is_an_error_with_its_fix(monkeypatch):
    monkeypatch.setattr(send_tensor.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
    with pytest.raises(EngineError, match=r"has 100 bytes left.*--update-weight-buffer-size.*--shm-size"):
        send_tensor.shareable(_chunk())


def test_the_way_torch_shares_tensors_elsewhere_is_left_as_it_was():
    before = torch.multiprocessing.get_sharing_strategy()
    chunk = _chunk()
    serialized(send_tensor.shareable(chunk), chunk)
    assert torch.multiprocessing.get_sharing_strategy() == before
