"""Repairs of megatron.core that would otherwise fail silently."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils.patches import install
from tests.unit.megatron_utils.operators import Operators
from tests.unit.megatron_utils.tiny_trainer import single_rank


def test_torch_itself_stays_as_it_is() -> None:
    compile_function, zeros = torch.compile, torch.zeros
    install()
    assert (torch.compile, torch.zeros) == (compile_function, zeros)
    assert not torch.cuda.is_available() or torch.cuda.device_count() > 0
    with torch.device("meta"):
        assert torch.zeros(1).is_meta


def test_the_groups_of_a_single_rank_share_a_thread() -> None:
    install()
    from megatron.core import parallel_state as mpu

    for _ in range(2):  # the second run has new groups
        with single_rank():
            torch.distributed.init_process_group("gloo")
            before = _num_gloo_threads()
            mpu.initialize_model_parallel(create_gloo_process_groups=False)
            groups = [mpu.get_tensor_model_parallel_group(), mpu.get_expert_model_parallel_group()]
            assert groups[0] is groups[1]
            assert torch.distributed.get_world_size(groups[0]) == 1
            torch.distributed.barrier(group=groups[0])
            assert _num_gloo_threads() <= before + 2, "Megatron makes 20 groups"


def _num_gloo_threads() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("gloo_tcp_loop") for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 64])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_swiglu_on_a_cpu_equals_single_operators_and_joins_no_halves(
    dtype: torch.dtype, width: int, is_weighted: bool
) -> None:
    install()
    from megatron.core.fusions import fused_bias_swiglu as fused

    generator = torch.Generator().manual_seed(0)
    gate_up, gradient = (torch.randn(33, columns, generator=generator).to(dtype) for columns in (2 * width, width))
    inputs = [gate_up] + [torch.rand(33, 1, generator=generator)] * is_weighted
    ours, plain = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    with Operators() as operators:
        out = (
            fused.weighted_bias_swiglu_impl(ours[0], None, ours[1])
            if is_weighted
            else fused.bias_swiglu_impl(*ours, None)
        )
        out.backward(gradient)
    gate, up = plain[0].chunk(2, dim=-1)
    reference = torch.nn.functional.silu(gate) * up
    reference = (reference * plain[1]).to(dtype) if is_weighted else reference
    reference.backward(gradient)
    assert torch.equal(out, reference)
    assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(ours, plain, strict=True))
    assert operators.names.count("aten::silu") == 1
    assert not {"aten::cat", "aten::sigmoid"} & set(operators.names)


def test_the_norm_of_all_gradients_is_computed_without_reading_that_of_each() -> None:
    install()
    from megatron.core.optimizer import clip_grads

    gradients = [torch.randn(3, 5), torch.randn(7), torch.randn(2, 2, 2)]
    with Operators() as operators:
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, torch.zeros(1), [gradients], False)
    assert norm.shape == (1,)
    torch.testing.assert_close(norm[0], torch.cat([one.flatten() for one in gradients]).norm())
    assert "aten::_local_scalar_dense" not in operators.names


def test_a_reduction_of_a_non_contiguous_tensor_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    from megatron.core.tensor_parallel import mappings

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.mul_(2))
    x = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(mappings._reduce(x, SimpleNamespace(size=lambda: 2)), 2 * torch.arange(6.0).view(2, 3).t())
