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
