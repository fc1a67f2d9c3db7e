"""Repairs of SGLang on a CPU."""

from __future__ import annotations

import pytest
import torch


def test_the_gate_of_a_shared_expert_is_what_the_kernel_computes_and_takes_its_place() -> None:
    from sglang.kernels.ops.elementwise import elementwise

    from slime.backends.sglang_utils.cpu_platform.platform import _gated_shared_experts

    generator = torch.Generator().manual_seed(0)
    hidden, shared, out = (torch.randn(5, 8, generator=generator) for _ in range(3))
    gate = torch.randn(8, generator=generator)
    expected = torch.stack([out[t] + torch.sigmoid((hidden[t] * gate).sum()) * shared[t] for t in range(5)])
    kernel = elementwise.fused_gate_sigmoid_mul_add
    try:
        _gated_shared_experts()
        elementwise.fused_gate_sigmoid_mul_add(hidden, gate, shared, out)
    finally:
        elementwise.fused_gate_sigmoid_mul_add = kernel
    torch.testing.assert_close(out, expected)


def test_an_engine_on_a_cpu_keeps_fp32_products_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.sglang_utils.cpu_platform.platform import _full_precision

    monkeypatch.setattr(
        torch, "set_float32_matmul_precision", torch.set_float32_matmul_precision
    )  # put back at the end
    _full_precision()
    torch.set_float32_matmul_precision("high")  # as SGLang's model runner does for GLM-4 MoE and MiniMax-M2
    assert torch.get_float32_matmul_precision() == "highest"


def _murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of whole words, step by step (Appleby's reference)."""
    h = 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
        h ^= k
        h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor % 2**32
    return h ^ h >> 16


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_random_numbers_of_seeds_are_the_hash_of_seed_position_and_column(dtype: torch.dtype) -> None:
    import sglang.srt.layers.sampler  # noqa: F401

    from slime.backends.sglang_utils.cpu_platform.platform import murmur_hash32

    assert _murmur3(b"test") == 0xBA6BD213  # published
    seeds, positions, columns = [0, 1234, 2**40 + 3, -7, 2**63 - 1], [0, 1, 17, 4095, 2**31 - 1], [0, 1, 151_935]
    found = murmur_hash32(
        torch.tensor(seeds).view(torch.uint64), torch.tensor(positions, dtype=dtype), torch.tensor(columns)
    )
    assert found.dtype == torch.int64
    assert found.tolist() == [
        [
            _murmur3(
                (seed % 2**64).to_bytes(8, "little") + b"".join(n.to_bytes(4, "little") for n in (position, column))
            )
            for column in columns
        ]
        for seed, position in zip(seeds, positions, strict=True)
    ]
