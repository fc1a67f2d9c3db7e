"""The kernels of a gated delta net, and their arguments."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slime.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of an accelerator that ``select_delta_rule`` reads."""
    from slime.backends.megatron_utils.model import gated_delta_net

    monkeypatch.setattr(gated_delta_net.accelerator, "current", lambda: SimpleNamespace(is_cpu=False))
    gated_delta_net._warn_of_plain_torch.cache_clear()


def _install(monkeypatch: pytest.MonkeyPatch, name: str, kernel: Any) -> None:
    """A module ``name`` that has ``kernel``, importable in this test."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    sys.modules[name].chunk_gated_delta_rule = kernel  # type: ignore[attr-defined]


def test_a_cpu_runs_plain_torch_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.megatron_utils.model import gated_delta_net

    monkeypatch.setattr(gated_delta_net.accelerator, "current", lambda: SimpleNamespace(is_cpu=True))
    assert gated_delta_net.select_delta_rule("flashqla") is gated_delta_net.gated_delta_rule


def test_without_flash_linear_attention_a_gpu_runs_plain_torch_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from slime.backends.megatron_utils.model import gated_delta_net

    monkeypatch.setitem(sys.modules, "fla", None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert gated_delta_net.select_delta_rule("fla") is gated_delta_net.gated_delta_rule
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "flash-linear-attention is not installed" in caplog.text


def test_kernels_that_were_asked_for_and_are_not_installed_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.megatron_utils.model.gated_delta_net import select_delta_rule

    monkeypatch.setitem(sys.modules, "flash_qla", None)
    with pytest.raises(ConfigError, match="--qwen-gdn-backend flashqla needs the package FlashQLA"):
        select_delta_rule("flashqla")


@pytest.mark.parametrize("version", ["3.4.0", "3.6.0", "3.7.1"])
def test_kernels_whose_gradients_triton_computes_wrongly_are_refused_before_the_first_step(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.backends.megatron_utils.model import gated_delta_net

    _install(monkeypatch, "fla.ops.gated_delta_rule", None)
    monkeypatch.setattr(gated_delta_net.metadata, "version", lambda _: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    if version == "3.7.1":
        assert gated_delta_net.select_delta_rule("fla") is not gated_delta_net.gated_delta_rule
        return
    with pytest.raises(
        ConfigError, match=rf"triton {version} computes wrong gradients.* 'triton>=3\.7\.1' or tilelang"
    ):
        gated_delta_net.select_delta_rule("fla")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    gated_delta_net.select_delta_rule("fla")  # not on other GPUs


@pytest.mark.parametrize(("backend", "module"), [("fla", "fla.ops.gated_delta_rule"), ("flashqla", "flash_qla")])
def test_a_kernel_is_called_as_its_library_wants_and_gives_what_plain_torch_gives(
    backend: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.backends.megatron_utils.model.attention import Sequences
    from slime.backends.megatron_utils.model.gated_delta_net import gated_delta_rule, select_delta_rule, unit_length

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        output_final_state: bool,
        cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        assert (q.shape, v.shape, g.shape) == ((1, 9, 2, 8), (1, 9, 2, 4), (1, 9, 2))
        assert (q.dtype, k.dtype, v.dtype) == (torch.bfloat16,) * 3
        assert (cu_seqlens.dtype, output_final_state) == (torch.int64, False)
        assert cu_seqlens.tolist() == [0, 4, 9]
        queries = q[0].float() * scale * 8**0.5
        return gated_delta_rule(queries, k[0].float(), v[0], g[0], beta[0], sequences)[None], None

    _install(monkeypatch, module, kernel)
    query, key = unit_length(torch.randn(9, 2, 8)), unit_length(torch.randn(9, 2, 8))
    value, decay = torch.randn(9, 2, 4).bfloat16(), -torch.rand(9, 2)
    sequences = Sequences((0, 4, 9), torch.device("cpu"))
    inputs = (query, key, value, decay, torch.rand(9, 2), sequences)
    out = select_delta_rule(backend)(*inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), gated_delta_rule(*inputs).float(), atol=0.02, rtol=0.02)
