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
    """Globals of a pickle of protocol 4: two strings each, which may have been memoised."""
    strings: list[str] = []
    memo: list[str] = []
    found = set()
    for code, argument, _ in pickletools.genops(data):
        if code.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            strings.append(argument)
        elif code.name == "MEMOIZE":
            memo.append(strings[-1] if strings else "")
        elif code.name == "BINGET":
            strings.append(memo[argument])
        elif code.name == "STACK_GLOBAL":
            found.add(" ".join(strings[-2:]))
    return found


def test_the_other_side_finds_every_tensor_by_its_metadata_without_a_copy():
    chunk = _chunk()
    flat = send_tensor.shareable(chunk)
    opened = pickle.loads(base64.b64decode(send_tensor.serialized(flat, chunk)))
    for meta, (name, tensor) in zip(opened["metadata"], chunk.tensors, strict=True):
        part = opened["flattened_tensor"][meta.start_idx : meta.end_idx]
        assert meta.name == name
        assert meta.numel == tensor.nbytes
        assert torch.equal(part.view(meta.dtype).reshape(meta.shape), tensor)
    flat[0] += 1
    assert opened["flattened_tensor"][0] == flat[0]


def test_a_payload_has_the_size_of_a_handle():
    chunk = _chunk(count=100_000)
    assert len(send_tensor.serialized(send_tensor.shareable(chunk), chunk)) < 4000


def test_only_names_that_sglang_lets_in_are_in_a_payload():
    chunk = WeightChunk([("a", torch.zeros(3, dtype=torch.bfloat16))])
    names = _names(base64.b64decode(send_tensor.serialized(send_tensor.shareable(chunk), chunk)))
    assert "types SimpleNamespace" in names
    assert names <= ALLOWED


def test_memory_is_given_back_with_the_last_reference():
    def files() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("torch_*")}

    before, chunk = files(), _chunk()
    flat = send_tensor.shareable(chunk)
    opened = pickle.loads(base64.b64decode(send_tensor.serialized(flat, chunk)))
    assert len(files() - before) == 1
    del flat, opened
    assert files() - before == set()


def test_too_little_shared_memory_is_an_error_with_its_fix(monkeypatch):
    monkeypatch.setattr(send_tensor.os, "statvfs", lambda path: types.SimpleNamespace(f_bavail=1, f_frsize=100))
    with pytest.raises(EngineError, match=r"has 100 bytes left.*--update-weight-buffer-size.*--shm-size"):
        send_tensor.shareable(_chunk())


def test_the_way_torch_shares_tensors_elsewhere_is_left_as_it_was():
    before = torch.multiprocessing.get_sharing_strategy()
    chunk = _chunk()
    send_tensor.serialized(send_tensor.shareable(chunk), chunk)
    assert torch.multiprocessing.get_sharing_strategy() == before
