"""Chunks of weights: bounded, in order, and never between two tensors that an engine fuses."""

from __future__ import annotations

import pytest
import torch

from slime.weight_sync.chunks import into_chunks

_LAYER = "model.layers.{}.self_attn."


def _weights() -> list[tuple[str, torch.Tensor]]:
    """4 bytes per element. Two layers of latent attention between other tensors."""
    weights = [("model.embed_tokens.weight", torch.zeros(10))]
    for layer in range(2):
        prefix = _LAYER.format(layer)
        weights += [
            (prefix + "q_a_proj.weight", torch.zeros(6)),
            (prefix + "kv_a_proj_with_mqa.weight", torch.zeros(4)),
            (prefix + "o_proj.weight", torch.zeros(3)),
        ]
    return weights


@pytest.mark.parametrize("max_bytes", range(4, 200, 4))
def test_tensors_that_an_engine_fuses_travel_together_whatever_the_size_of_a_chunk(max_bytes: int) -> None:
    chunks = [[name for name, _ in chunk.tensors] for chunk in into_chunks(_weights(), max_bytes)]
    assert [name for chunk in chunks for name in chunk] == [name for name, _ in _weights()]
    for layer in range(2):
        pair = {_LAYER.format(layer) + name for name in ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")}
        assert any(pair <= set(chunk) for chunk in chunks)


@pytest.mark.parametrize("max_bytes", [40, 64, 80])
def test_a_chunk_is_as_large_as_asked_for_at_most_and_a_larger_unit_travels_alone(max_bytes: int) -> None:
    for chunk in into_chunks(_weights(), max_bytes):
        assert chunk.num_bytes <= max_bytes


def test_every_tensor_of_a_chunk_of_several_dtypes_starts_at_a_multiple_of_its_element_size() -> None:
    dtypes = {"a": torch.float8_e4m3fn, "b": torch.float32, "c": torch.bfloat16, "d": torch.float64, "e": torch.float32}
    (chunk,) = into_chunks([(name, torch.ones(3).to(dtype)) for name, dtype in dtypes.items()], 1000)
    assert [name for name, _ in chunk.tensors] == ["d", "b", "e", "c", "a"]
    flat, begin = chunk.flatten(), 0
    for name, tensor in chunk.tensors:
        part = flat[begin : begin + tensor.nbytes].view(dtypes[name])  # refuses an offset that is not aligned
        assert part.float().tolist() == [1.0, 1.0, 1.0]
        begin += tensor.nbytes
