"""A package ``deep_gemm`` on any device: the kernels that the trainer calls, as plain products."""

from __future__ import annotations

from types import ModuleType

import torch

ROWS = 4
"""Rows that belong to one expert in the grouped products (128 on a GPU)."""

_Scaled = tuple[torch.Tensor, torch.Tensor]


def make_package() -> ModuleType:
    """The module. ``calls`` lists the kernels that were called."""
    module = ModuleType("deep_gemm")
    calls: list[str] = []

    def bf16_gemm_nt(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        calls.append("bf16_gemm_nt")
        d.copy_(a @ b.t())

    def fp8_gemm_nt(a: _Scaled, b: _Scaled, d: torch.Tensor) -> None:
        calls.append("fp8_gemm_nt")
        d.copy_(_whole(*a, rows=1) @ _whole(*b, rows=128).t())

    def m_grouped_bf16_gemm_nt_contiguous(
        a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, owners: torch.Tensor
    ) -> None:
        calls.append("m_grouped_bf16_gemm_nt_contiguous")
        _grouped(a, list(b), d, owners)

    def m_grouped_fp8_gemm_nt_contiguous(a: _Scaled, b: _Scaled, d: torch.Tensor, owners: torch.Tensor) -> None:
        calls.append("m_grouped_fp8_gemm_nt_contiguous")
        weights = [_whole(values, scales, rows=128) for values, scales in zip(*b, strict=True)]
        _grouped(_whole(*a, rows=1), weights, d, owners)

    module.__dict__.update(
        calls=calls,
        bf16_gemm_nt=bf16_gemm_nt,
        fp8_gemm_nt=fp8_gemm_nt,
        m_grouped_bf16_gemm_nt_contiguous=m_grouped_bf16_gemm_nt_contiguous,
        m_grouped_fp8_gemm_nt_contiguous=m_grouped_fp8_gemm_nt_contiguous,
        get_mk_alignment_for_contiguous_layout=lambda: ROWS,
    )
    return module


def _whole(values: torch.Tensor, scales: torch.Tensor, *, rows: int) -> torch.Tensor:
    assert values.dtype == torch.float8_e4m3fn
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(128, 1)
    return values.float() * spread[: values.shape[0], : values.shape[1]]


def _grouped(a: torch.Tensor, weights: list[torch.Tensor], d: torch.Tensor, owners: torch.Tensor) -> None:
    """Every block of rows has one owner, as the kernel expects. Rows without an owner hold rubbish."""
    assert owners.dtype == torch.int32
    assert len(owners) == len(a) == len(d)
    assert len(owners) % ROWS == 0
    d.fill_(float("nan"))
    for block in owners.view(-1, ROWS):
        assert len(set(block.tolist()) - {-1}) == 1
    for expert, weight in enumerate(weights):
        d[owners == expert] = (a[owners == expert] @ weight.t()).to(d.dtype)
