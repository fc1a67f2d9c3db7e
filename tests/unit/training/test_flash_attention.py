"""The call of torch's variable-length kernel, which needs a GPU: a reference with the same requirements replaces it."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from slime.backends.training import attention
from slime.backends.training.attention import choose_kernel, packed_attention, plan_attention
from slime.backends.training.context_parallel import picked_rows, zigzag_rows
from slime.batch.packing import pack
from slime.utils import accelerator
from slime.utils.accelerator import CPUAccelerator, CUDAAccelerator
from slime.utils.errors import ConfigError

LENGTHS = (8, 24, 4)
SCALE = 0.3


def played_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_bounds: torch.Tensor,
    k_bounds: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Causal from the last query and key of each sequence. Refuses the inputs that flash attention refuses."""
    assert window_size == (-1, 0)
    assert enable_gqa == (q.size(1) != k.size(1))
    assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
    assert q.size(-1) == k.size(-1) == v.size(-1) <= 256
    assert q.size(-1) % 8 == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert q_bounds.dtype == k_bounds.dtype == torch.int32
    out = torch.empty_like(q)
    groups = q.size(1) // k.size(1)
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(q_bounds.tolist()), itertools.pairwise(k_bounds.tolist()), strict=True
    ):
        assert q1 - q0 <= longest_q
        assert k1 - k0 <= longest_k
        keys, values = (x[k0:k1].repeat_interleave(groups, dim=1).float() for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1].float(), keys) * scale
        rows, columns = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)
        scores.masked_fill_(columns > rows + (k1 - k0) - (q1 - q0), -math.inf)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    return out


def older_kernel(q, k, v, q_bounds, k_bounds, longest_q, longest_k, *, scale=None, window_size=(-1, -1)):
    """The keywords of torch 2.11, whose kernel takes fewer key heads without being asked."""
    is_gqa = q.size(1) != k.size(1)
    more = {"scale": scale, "window_size": window_size, "enable_gqa": is_gqa}
    return played_kernel(q, k, v, q_bounds, k_bounds, longest_q, longest_k, **more)


def oldest_kernel(q, k, v, q_bounds, k_bounds, longest_q, longest_k, is_causal=False):
    """The keywords of torch 2.10, which has no scale."""
    raise AssertionError("not to be called")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch):
    accelerator.set_accelerator(CUDAAccelerator())
    attention._varlen_keywords.cache_clear()
    yield
    accelerator.reset_accelerator()
    attention._varlen_keywords.cache_clear()
    choose_kernel("auto")


@pytest.fixture
def kernel(on_cuda, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(varlen, "varlen_attn", played_kernel)


def heads(number: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number * width)
    return torch.randn(sum(LENGTHS), number, width, generator=generator).to(dtype)


def bounds() -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """By the path that needs no kernel."""
    return packed_attention(q.float(), k.float(), v.float(), plan_attention(bounds()), scale=SCALE)


@pytest.mark.parametrize(("num_groups", "value_width"), [(4, 16), (2, 16), (4, 8)])
def test_the_kernel_gets_what_it_takes_and_gives_what_the_padded_path_gives(kernel, num_groups, value_width):
    q, k, v = heads(4, 16), heads(num_groups, 16), heads(num_groups, value_width)
    out = packed_attention(q, k, v, plan_attention(bounds()), scale=SCALE)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), padded(q, k, v), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_context_parallel_rank_sees_the_keys_up_to_its_chunks(kernel, rank, monkeypatch):
    q, k, v = heads(4, 16), heads(2, 16), heads(2, 16)
    rows = [zigzag_rows(bounds(), one, 2) for one in range(2)]
    everybody = torch.cat(rows)
    monkeypatch.setattr(attention, "gather_rows", lambda parts, group: (k[everybody], v[everybody]))
    plan = plan_attention(bounds(), rank, 2)
    out = packed_attention(q[rows[rank]], k[rows[rank]], v[rows[rank]], plan, scale=SCALE, cp_group="both")
    torch.testing.assert_close(out.float(), padded(q, k, v)[rows[rank]], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("again", [False, True])
def test_samples_with_shared_prefixes_see_the_rows_of_earlier_ones(kernel, again):
    """Also the third sample, which is the beginning of the second, the fourth, which leaves it, and padding."""
    samples = [[1, 2, 3, 4], [1, 2, 5, 6, 7], [1, 2, 5, 6, 7], [1, 2, 5, 8]]
    shared = [0, 2, 5, 3]
    packed = pack([torch.tensor(one) for one in samples], [1] * 4, shared=shared, pad_multiple=12)
    whole = [torch.tensor(rows) for rows in ([0, 1, 2, 3], [0, 1, 4, 5, 6], [0, 1, 4, 5, 6], [0, 1, 4, 7])]
    q, k, v = (heads(number, 16)[:12].requires_grad_() for number in (4, 2, 2))
    plan = plan_attention(packed.borders, shared=packed.shared)
    out = packed_attention(q, k, v, plan, scale=SCALE, picks_again=again)
    factors = torch.linspace(-1, 1, 12)[:, None, None]
    (out.float() * factors).sum().backward()
    ours = [out.detach(), q.grad, k.grad, v.grad]
    q, k, v = (one.detach().float().requires_grad_() for one in (q, k, v))
    expected = torch.zeros(12, 4, 16)
    for rows in [*whole, torch.arange(8, 12)]:
        alone = plan_attention([0, len(rows)])
        expected = expected.index_copy(0, rows, packed_attention(q[rows], k[rows], v[rows], alone, scale=SCALE))
    (expected * factors).sum().backward()
    for mine, other in zip(ours, [expected.detach(), q.grad, k.grad, v.grad], strict=True):
        torch.testing.assert_close(mine.float(), other, atol=4e-2, rtol=4e-2)


def test_gradients_of_a_prefix_that_hundreds_of_samples_share_are_not_summed_in_16_bit():
    """CUDA rounds after each row: in bf16, 256 + 1 is 256. A CPU does not, so the dtype of the sum is compared."""
    summed = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "index_add" in str(func) or "index_put" in str(func):
                summed.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    row = torch.ones(1, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    with Watch(), picked_rows([row], torch.zeros(1000, dtype=torch.int64), again=False) as (picked,):
        picked.sum().backward()
    assert summed == [torch.float32]
    assert torch.equal(row.grad, torch.full_like(row, 1000))


@pytest.mark.parametrize(("width", "dtype"), [(20, torch.bfloat16), (264, torch.bfloat16), (16, torch.float32)])
def test_what_the_kernel_does_not_take_goes_the_padded_way(kernel, width, dtype):
    q, k, v = (heads(2, width, dtype) for _ in range(3))
    out = packed_attention(q, k, v, plan_attention(bounds()), scale=SCALE)
    torch.testing.assert_close(out.float(), padded(q, k, v), atol=3e-2, rtol=3e-2)


def test_a_kernel_without_a_keyword_for_fewer_key_heads_gets_them(on_cuda, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", older_kernel)
    q, k, v = heads(4, 16), heads(2, 16), heads(2, 16)
    out = packed_attention(q, k, v, plan_attention(bounds()), scale=SCALE)
    torch.testing.assert_close(out.float(), padded(q, k, v), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kernel_of", [oldest_kernel, None])
def test_without_a_kernel_that_takes_a_scale_attention_is_padded(kernel_of, on_cuda, monkeypatch):
    if kernel_of is None:
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    else:
        monkeypatch.setattr(varlen, "varlen_attn", kernel_of)
    q, k, v = heads(4, 16), heads(2, 16), heads(2, 16)
    plan = plan_attention(bounds())
    plan.prepare()
    assert "lengths" not in vars(plan)
    out = packed_attention(q, k, v, plan, scale=SCALE)
    torch.testing.assert_close(out.float(), padded(q, k, v), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", ["unfused", "local"])
def test_a_flag_chooses_the_padded_way(backend, kernel, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", oldest_kernel)
    choose_kernel(backend)
    q, k, v = heads(4, 16), heads(2, 16), heads(2, 16)
    out = packed_attention(q, k, v, plan_attention(bounds()), scale=SCALE)
    torch.testing.assert_close(out.float(), padded(q, k, v), atol=2e-2, rtol=2e-2)


def test_newer_kernels_are_activated_in_torch_or_refused_with_the_fix(on_cuda, monkeypatch):
    activated: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    for backend in ("auto", "flash", "fused", "unfused", "local", "fa3", "fa4"):
        choose_kernel(backend)
    assert activated == ["FA3", "FA4"]
    monkeypatch.undo()
    accelerator.set_accelerator(CUDAAccelerator())
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"--attention-backend fa4: .*flash_attn.*Install the package flash-attn-4"):
        choose_kernel("fa4")
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    with pytest.raises(ConfigError, match=r"--attention-backend fa3: torch .* cannot exchange its kernel"):
        choose_kernel("fa3")
    accelerator.set_accelerator(CPUAccelerator())
    with pytest.raises(ConfigError, match="needs CUDA"):
        choose_kernel("fa3")
